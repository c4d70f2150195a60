# SPDX-License-Identifier: Apache-2.0
"""A command group that imports a command when it runs. ``--help`` lists the commands from a table, without an import."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import click

from aliquot_cli import exit_codes


@dataclass(frozen=True, slots=True)
class Lazy:
    """Where a command is, and one line of help."""

    module: str
    attribute: str
    help: str

    def installed(self) -> bool:
        """Whether its top-level package is installed: production images have no ``aliquot_lab``."""
        return find_spec(self.module.partition(".")[0]) is not None


class LazyGroup(click.Group):
    """A group of commands; those in ``lazy`` are imported when they run."""

    def __init__(self, *arguments: Any, lazy: Mapping[str, Lazy], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See ``click.Group``."""
        return sorted({*super().list_commands(ctx), *(name for name, lazy in self._lazy.items() if lazy.installed())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See ``click.Group``."""
        if (lazy := self._lazy.get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        if not lazy.installed():
            package = lazy.module.partition(".")[0]
            ctx.fail(f"{cmd_name} needs the package {package}, which production images do not have: run it from the wheel or a source tree")
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
