# SPDX-License-Identifier: Apache-2.0
"""Shell completion: the script for ``aliquot``, and the program that ``kubectl`` calls to complete ``kubectl vgpu``."""

import sys
from collections.abc import Sequence

import click
from click.shell_completion import ShellComplete, get_completion_class

_NO_FILE_COMPLETION = 4
"""The directive that kubectl expects in the last line: offer no file names."""


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(*, shell: str) -> None:
    """Print a shell completion script. Use it with  source <(aliquot completion bash).

    kubectl needs no script: it finds the program kubectl_complete-vgpu on the PATH.
    """
    kind = get_completion_class(shell)
    if kind is None:  # pragma: no cover - click.Choice leaves no other
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(_main(), {}, "aliquot", "_ALIQUOT_COMPLETE").source())


def candidates(words: Sequence[str]) -> list[str]:
    """Return the completions of the last word, each with its help after a tab."""
    *before, incomplete = words or [""]
    complete = ShellComplete(_main(), {}, "aliquot", "_ALIQUOT_COMPLETE")
    return [f"{item.value}\t{item.help}" if item.help else str(item.value) for item in complete.get_completions(list(before), incomplete)]


def kubectl_complete() -> None:
    """Print the completions for kubectl, one on each line, then its directive."""
    print("\n".join([*candidates(sys.argv[1:]), f":{_NO_FILE_COMPLETION}"]))


def _main() -> click.Command:
    from aliquot_cli.__main__ import main

    return main
