"""``aliquot simulate``: its arguments; what it does is in ``aliquot.simulate``."""

from pathlib import Path

import click

from aliquot.cli.options import output_option
from aliquot.cli.output import Output
from program.extras import MissingExtraError, scheduler_extra


@click.command(name="simulate")
@click.option("--trace", "directory", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Directory with the lists.")
@click.option("--pods", "lists", metavar="NAME", multiple=True, help="Pod list by its short name, such as default.  [default: all]")
@click.option("--policy", "policies", metavar="NAME", multiple=True, help="frag, binpack, fgd, bestfit, ...  [default: frag]")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="How many orders of arrival to try.")
@click.option("--first-seed", type=int, default=42, show_default=True, help="The first of them.")
@click.option(
    "--departures", "load", metavar="LOAD", type=click.FloatRange(0, 2, min_open=True), help="Let pods leave; demand as a part of the GPUs."
)
@click.option("--own-cores", is_flag=True, help="Give pods of a part of a GPU compute that differs from their memory, drawn by the seed.")
@click.option(
    "--default-cpu-pods", is_flag=True, help="Leave pods without GPUs to kube-scheduler's defaults (the extender's policies only)."
)
@click.option("--links", is_flag=True, help="Compare who chooses linked GPUs instead; needs no trace.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes to use.")
@output_option
def command(
    *,
    directory: Path | None,
    lists: tuple[str, ...],
    policies: tuple[str, ...],
    seeds: int,
    first_seed: int,
    load: float | None,
    own_cores: bool,
    default_cpu_pods: bool,
    links: bool,
    jobs: int,
    output: Output,
) -> None:
    """Replay a trace of pods on a cluster, through the extender's own code, and say how much of the GPUs was allocated.

    Reads traces in the format of openb (Alibaba GPU trace v2023). Needs no cluster and no GPU. docs/placement.md explains the
    procedure and the other policies, and has results.
    """
    try:
        with scheduler_extra("simulate"):
            from aliquot.simulate.command import SimulateOptions, compare_links, run
            from aliquot.simulate.run import POLICIES
            from aliquot.simulate.trace import TraceError
    except MissingExtraError as exc:
        raise click.ClickException(str(exc)) from exc

    if links:
        click.echo(compare_links(output))
        return
    if directory is None:
        raise click.UsageError("--trace names the directory with the lists of a trace: give it, or --links, which needs none")
    unknown = [name for name in policies if name not in POLICIES]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: there are {', '.join(POLICIES)}", param_hint="--policy")
    numbers = range(first_seed, first_seed + seeds)
    options = SimulateOptions(directory, lists, policies or ("frag",), numbers, jobs, output, load, own_cores, not default_cpu_pods)
    try:
        click.echo(run(options))
    except TraceError as exc:
        raise click.ClickException(str(exc)) from exc
