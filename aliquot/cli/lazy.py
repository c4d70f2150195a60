"""A command group whose commands are imported when they are called: ``--help`` lists them from a table and imports none."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from aliquot.cli import exit_codes


@dataclass(frozen=True, slots=True)
class Lazy:
    """Where a command is, and what it does in a line."""

    module: str
    attribute: str
    help: str


class LazyGroup(click.Group):
    """A group of commands, some of them given as ``Lazy``."""

    def __init__(self, *arguments: Any, lazy: Mapping[str, Lazy], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See ``click.Group``."""
        return sorted({*super().list_commands(ctx), *self._lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See ``click.Group``."""
        if (lazy := self._lazy.get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(importlib.import_module(lazy.module), lazy.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, without importing them."""
        rows = []
        for name in self.list_commands(ctx):
            if (lazy := self._lazy.get(name)) is not None:
                rows.append((name, lazy.help))
            elif (command := super().get_command(ctx, name)) is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(formatter.width)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        with formatter.section("Exit status"):
            formatter.write_dl([(str(code), meaning) for code, meaning in exit_codes.TABLE.items()])
