"""Shell completion: the script for ``aliquot``, and what ``kubectl`` asks to complete ``kubectl vgpu``."""

import sys
from collections.abc import Sequence

import click
from click.shell_completion import ShellComplete, get_completion_class

_NO_FILE_COMPLETION = 4
"""The last line that kubectl wants: its directive to offer no file names."""


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(*, shell: str) -> None:
    """Print a script that completes arguments: source it, as in  source <(aliquot completion bash).

    For kubectl, the program kubectl_complete-vgpu is found on the PATH by itself.
    """
    kind = get_completion_class(shell)
    if kind is None:  # pragma: no cover - click.Choice leaves no other
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(_main(), {}, "aliquot", "_ALIQUOT_COMPLETE").source())


def candidates(words: Sequence[str]) -> list[str]:
    """Return what may stand in place of the last word, given those before it."""
    *before, incomplete = words or [""]
    complete = ShellComplete(_main(), {}, "aliquot", "_ALIQUOT_COMPLETE")
    return [f"{item.value}\t{item.help}" if item.help else str(item.value) for item in complete.get_completions(list(before), incomplete)]


def kubectl_complete() -> None:
    """Answer kubectl: a candidate a line, then its directive."""
    print("\n".join([*candidates(sys.argv[1:]), f":{_NO_FILE_COMPLETION}"]))


def _main() -> click.Command:
    from aliquot.__main__ import main

    return main
