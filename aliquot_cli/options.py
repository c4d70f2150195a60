# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, with the names that kubectl uses."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from aliquot_cli import live
from aliquot_cli.access import Target
from aliquot_cli.output import Output

Command = TypeVar("Command", bound=Callable[..., Any])


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --kubeconfig and --context; the command gets ``target``."""

    @click.option(
        "--kubeconfig", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Kubeconfig file.  [default: as kubectl]"
    )
    @click.option("--context", metavar="NAME", shell_complete=live.contexts, help="Context of the kubeconfig to use.")
    @functools.wraps(command)
    def with_target(*arguments: Any, kubeconfig: Path | None, context: str | None, **options: Any) -> None:
        command(*arguments, target=Target(kubeconfig, context), **options)

    return with_target


def output_option(command: Command) -> Command:
    """Add -o/--output."""
    option = click.option(
        "-o",
        "--output",
        type=click.Choice([str(form) for form in Output]),
        default=str(Output.TABLE),
        show_default=True,
        callback=lambda _context, _parameter, value: Output(value),
        help="Output format; wide shows all columns.",
    )
    return option(command)


def namespace_options(command: Command) -> Command:
    """Add -n/--namespace; the default is all namespaces."""
    option = click.option("-n", "--namespace", metavar="NAME", shell_complete=live.namespaces, help="Only this namespace.  [default: all]")
    return option(command)


def node_option(command: Command) -> Command:
    """Add --node, which can be repeated."""
    option = click.option(
        "--node", "node_names", metavar="NAME", multiple=True, shell_complete=live.nodes, help="Only this node; can be repeated."
    )
    return option(command)
