"""The ``aliquot`` command. Each subcommand is imported when it is called, so that ``--help`` answers at once."""

import os
from pathlib import Path

import click

from aliquot.cli.lazy import Lazy, LazyGroup

_LAZY = {
    "completion": Lazy("aliquot.cli.completion", "command", "Print a script that completes arguments in a shell."),
    "cordon": Lazy("aliquot.cli.cordon", "cordon", "Keep new work off a GPU or a node's GPUs."),
    "describe": Lazy("aliquot.cli.get", "describe", "Show one GPU, node or pod in full."),
    "doctor": Lazy("aliquot.cli.node_doctor", "command", "Examine a node, each finding with its cure."),
    "drift": Lazy("aliquot.cli.drift", "command", "Show what differs between promised, held and used."),
    "get": Lazy("aliquot.cli.get", "get", "List GPUs, nodes with GPUs, or pods that ask for GPUs."),
    "replay": Lazy("aliquot.explain.commands", "replay", "Decide again what a scheduler decided."),
    "simulate": Lazy("aliquot.cli.simulate", "command", "Replay a trace of pods and say how much of the GPUs was allocated."),
    "top": Lazy("aliquot.cli.top", "command", "Show who uses how much of which GPU."),
    "uncordon": Lazy("aliquot.cli.cordon", "uncordon", "Let a GPU have new work again."),
    "what-if": Lazy("aliquot.explain.commands", "what_if", "Try new pods, drains and cordons on a copy of the cluster."),
    "why": Lazy("aliquot.explain.commands", "why", "Say why a pod waits, and the least that would make it fit."),
}


@click.group(cls=LazyGroup, lazy=_LAZY, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="aliquot", prog_name="aliquot")
def main() -> None:
    """Share GPUs between containers, each with the memory and compute it asked for."""
    if os.environ.get("NO_COLOR"):
        click.get_current_context().color = False


@main.command()
@click.option("--topology", metavar="NAME", help="Simulated node: a profile's name or a topology file.  [default: a100x8-mig]")
@click.option("--real", is_flag=True, help="Use this machine's NVIDIA driver and GPUs instead of simulated ones.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document and nothing else.")
@click.option("--keep", is_flag=True, help="Keep node and containers running afterwards, until Ctrl-C.")
@click.option("--seconds", type=click.FloatRange(min=1), default=5.0, show_default=True, help="How long the neighbours work undisturbed.")
def demo(*, topology: str | None, real: bool, as_json: bool, keep: bool, seconds: float) -> None:
    """Run the main job end to end: pods share GPUs, each is held to its slice, and every promise is measured.

    Starts the agent on a node of its own below a temporary directory, with stand-ins for kubelet, container runtime and
    API server that speak the real contracts. Needs neither root nor a GPU nor a network. The exit status is 0 only when
    every promise held.
    """
    if real and topology is not None:
        raise click.UsageError("--real uses the GPUs of this machine; --topology names simulated ones: give one of the two")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC reads it when it is loaded
    from aliquot.demo.command import DemoOptions, run

    options = DemoOptions(topology=topology or "a100x8-mig", real=real, as_json=as_json, keep=keep, seconds=seconds)
    raise SystemExit(run(options))


@main.group()
def region() -> None:
    """Look at what a container may use and what its processes use."""


@region.command()
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option("--pid", type=click.IntRange(min=1), help="A process of the container, as this host numbers it, instead of the directory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def dump(*, directory: Path | None, pid: int | None, as_json: bool) -> None:
    """Show the limits and the usage region of one container.

    DIRECTORY holds the files limits and region: /run/aliquot/containers/<grant> on a node, /run/aliquot in a container.
    """
    if (directory is None) == (pid is None):
        raise click.UsageError("give a directory or --pid, one of the two")
    from aliquot.region import RegionDumpError, directory_of_process, lines, read_pages, to_json

    try:
        pages = read_pages(directory if directory is not None else directory_of_process(pid or 0))
    except RegionDumpError as exc:
        raise click.ClickException(str(exc)) from exc
    click.echo(to_json(pages) if as_json else "\n".join(lines(pages)))


def kubectl_vgpu() -> None:
    """Be ``kubectl vgpu``: the same commands under kubectl's name for them."""
    main(prog_name="kubectl vgpu")


if __name__ == "__main__":
    main(prog_name="aliquot")
