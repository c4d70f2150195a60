# SPDX-License-Identifier: Apache-2.0
"""The ``aliquot`` command. Each subcommand is imported when it runs, so that ``--help`` is fast."""

import os
from pathlib import Path

import click

from aliquot_cli.lazy import Lazy, LazyGroup

_LAZY = {
    "adopt": Lazy("aliquot_cli.explain.adopt", "adopt", "Show what pods of other systems would become."),
    "completion": Lazy("aliquot_cli.completion", "command", "Print a shell completion script."),
    "cordon": Lazy("aliquot_cli.cordon", "cordon", "Keep new pods off a GPU, or off all GPUs of a node."),
    "defrag": Lazy("aliquot_cli.explain.defrag", "defrag", "Plan moves of pods that free a place or whole nodes, and check such a plan."),
    "demo": Lazy("aliquot_lab.commands", "demo", "Share GPUs between pods on this machine and check every limit."),
    "describe": Lazy("aliquot_cli.get", "describe", "Show one GPU, node or pod in full."),
    "doctor": Lazy("aliquot_cli.node_doctor", "command", "Check a node; each finding comes with a fix."),
    "drift": Lazy("aliquot_cli.drift", "command", "Show where grants, files and use differ on the nodes."),
    "get": Lazy("aliquot_cli.get", "get", "List GPUs, nodes with GPUs, or pods that request GPUs."),
    "replay": Lazy("aliquot_cli.explain.commands", "replay", "Repeat a recorded decision of the scheduler."),
    "simulate": Lazy("aliquot_lab.commands", "simulate", "Replay a trace of pods and report how much of the GPUs was allocated."),
    "top": Lazy("aliquot_cli.top", "command", "Show how much of each GPU is used."),
    "uncordon": Lazy("aliquot_cli.cordon", "uncordon", "Allow new pods on a cordoned GPU or node again."),
    "what-if": Lazy("aliquot_cli.explain.commands", "what_if", "Try new pods, drains and cordons on a copy of the cluster's state."),
    "why": Lazy("aliquot_cli.explain.commands", "why", "Show why a pod waits, and the smallest change that helps."),
}


@click.group(cls=LazyGroup, lazy=_LAZY, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="aliquot", prog_name="aliquot")
def main() -> None:
    """Share GPUs between containers, each with the memory and compute that it requests."""
    if os.environ.get("NO_COLOR"):
        click.get_current_context().color = False


@main.group()
def region() -> None:
    """Show what a container may use and what its processes use."""


@region.command()
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option("--pid", type=click.IntRange(min=1), help="A process of the container, by its pid on this host, instead of the directory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def dump(*, directory: Path | None, pid: int | None, as_json: bool) -> None:
    """Show the limits and the usage region of one container.

    DIRECTORY contains the files limits and region: /run/aliquot/containers/<grant> on a node, /run/aliquot in a container.
    """
    if (directory is None) == (pid is None):
        raise click.UsageError("expected a directory or --pid: give one of the two")
    from aliquot_cli.region import RegionDumpError, directory_of_process, lines, read_files, to_json

    try:
        files = read_files(directory if directory is not None else directory_of_process(pid or 0))
    except RegionDumpError as exc:
        raise click.ClickException(str(exc)) from exc
    click.echo(to_json(files) if as_json else "\n".join(lines(files)))


def kubectl_vgpu() -> None:
    """Run as ``kubectl vgpu``: the same commands under kubectl's name."""
    main(prog_name="kubectl vgpu")


if __name__ == "__main__":
    main(prog_name="aliquot")
