# SPDX-License-Identifier: Apache-2.0
"""The command lines of ``aliquot demo`` and ``aliquot simulate``. The packages of the same names do the work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from aliquot.process.extras import MissingExtraError, scheduler_extra
from aliquot_cli.options import output_option
from aliquot_cli.output import Output


@click.command()
@click.option("--topology", metavar="NAME", help="Simulated node: a profile's name or a topology file.  [default: a100x8-mig]")
@click.option("--real", is_flag=True, help="Use this machine's NVIDIA driver and GPUs instead of simulated ones.")
@click.option("--torch", is_flag=True, help="Run PyTorch in two pods: one trains, one fills its share.")
@click.option("--json", "as_json", is_flag=True, help="Print only the result, as one JSON document.")
@click.option("--keep", is_flag=True, help="Keep node and containers running at the end, until Ctrl-C.")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=5.0, show_default=True, help="How long all pods work before the last measurement."
)
def demo(*, topology: str | None, real: bool, torch: bool, as_json: bool, keep: bool, seconds: float) -> None:
    """Share GPUs between pods on this machine: measure what each pod sees and uses, and check every limit.

    Starts the agent on a node below a temporary directory, with stand-ins for kubelet, container runtime and API server
    that use the real interfaces. Needs no root, no GPU and no network. The exit status is 0 only when every check passes.
    """
    if real and topology is not None:
        raise click.UsageError("--real uses this machine's GPUs, --topology simulated ones: give one of the two")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC reads it at import
    from aliquot_lab.demo.command import DemoOptions, run

    options = DemoOptions(topology=topology or "a100x8-mig", real=real, as_json=as_json, keep=keep, torch=torch, seconds=seconds)
    raise SystemExit(run(options))


@click.command()
@click.option("--nodes", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="CSV list of nodes.")
@click.option("--pods", "pods", metavar="FILE", multiple=True, help="CSV list of pods. With --trace: short name of a list.  [default: all]")
@click.option("--queues", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="CSV list of queues.")
@click.option(
    "--policy",
    "policies",
    metavar="NAME",
    multiple=True,
    help="frag, binpack, fgd, bestfit, ..., or one of ours with changed weights: frag:cpu_used=0  [default: frag]",
)
@click.option("--baseline", "baselines", metavar="NAME,...", default="", help="Policies to compare with, such as hami-binpack,kai-binpack.")
@click.option("--report", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write the result with charts as HTML.")
@click.option("--no-preemption", is_flag=True, help="Let more important pods wait instead of ending less important ones.")
@click.option("--seed", "--first-seed", "seed", type=int, default=42, show_default=True, help="Seed of the first replay.")
@click.option(
    "--trace",
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with openb's lists of nodes and pods: replay FGD's procedure instead.",
)
@click.option(
    "--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="With --trace: number of replays, each with another order."
)
@click.option(
    "--departures",
    "load",
    metavar="LOAD",
    type=click.FloatRange(0, 2, min_open=True),
    help="With --trace: let pods end; average demand as a part of all GPUs.",
)
@click.option("--consolidate", is_flag=True, help="With --departures: move pods for waiting ones of several GPUs (our policies only).")
@click.option("--starts", is_flag=True, help="With --departures: hold room for waiting pods, and rate the stated start times.")
@click.option("--most-pods", metavar="N", type=click.IntRange(10), help="With --departures: replay only the first N arrivals.")
@click.option("--own-cores", is_flag=True, help="With --trace: draw the compute of pods with a part of a GPU, apart from their memory.")
@click.option(
    "--default-cpu-pods", is_flag=True, help="Place pods without GPUs as kube-scheduler does by default (the extender's policies only)."
)
@click.option(
    "--benchmark",
    type=click.Choice(["quick", "full"]),
    help="With --trace: repeat docs/measurements/placement.md, the page in full or one seed of two lists.",
)
@click.option("--links", is_flag=True, help="Compare how policies choose linked GPUs instead; needs no list.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Number of processes.")
@output_option
def simulate(
    *,
    nodes: Path | None,
    pods: tuple[str, ...],
    queues: Path | None,
    policies: tuple[str, ...],
    baselines: str,
    report: Path | None,
    no_preemption: bool,
    seed: int,
    directory: Path | None,
    seeds: int,
    load: float | None,
    consolidate: bool,
    starts: bool,
    most_pods: int | None,
    own_cores: bool,
    default_cpu_pods: bool,
    benchmark: str | None,
    links: bool,
    jobs: int,
    output: Output,
) -> None:
    """Say what a cluster would do with a list of pods under a policy, with the scheduler's own code. Needs no cluster and no GPU.

    docs/use/simulate.md describes the lists and the report, docs/measurements/placement.md FGD's procedure (--trace) and its results.
    """
    of_lists = (("--nodes", nodes), ("--queues", queues), ("--report", report), ("--no-preemption", no_preemption))
    of_departures = (("--consolidate", consolidate), ("--starts", starts), ("--most-pods", most_pods))
    of_traces = (("--departures", load), ("--own-cores", own_cores), ("--seeds", seeds > 1), *of_departures)
    of_replays = (("--pods", pods), ("--policy", policies), ("--baseline", baselines), ("--default-cpu-pods", default_cpu_pods))
    compared = (*(policies or ("frag",)), *_names(baselines))
    with _simulation_errors():
        from aliquot_lab.simulate import benchmark as page
        from aliquot_lab.simulate import command as replays
        from aliquot_lab.simulate.timeline import command as timeline

        if links:
            text = replays.compare_links(output)
        elif directory is None:
            _expect_no(*of_traces, ("--benchmark", benchmark), mode="--nodes")
            if nodes is None or len(pods) != 1:
                raise click.UsageError("expected --nodes and one --pods, or --trace with the directory of a trace, or --links")
            lists = (nodes, Path(pods[0]), queues)
            text = timeline.run(
                timeline.TimelineOptions(*lists, compared, seed, jobs, output, not no_preemption, not default_cpu_pods, report)
            )
        elif benchmark is not None:
            _expect_no(*of_lists, *of_traces, *of_replays, mode="--benchmark")
            text = page.run_benchmark(directory, page.Extent(benchmark), jobs, output)
        else:
            _expect_no(*of_lists, mode="--trace")
            if starts:
                _expect_no(("--consolidate", consolidate), ("--default-cpu-pods", default_cpu_pods), mode="--starts")
            if load is None:
                _expect_no(*of_departures, mode="--trace without --departures: no pod waits there")
            how = (range(seed, seed + seeds), jobs, output, load, own_cores, not default_cpu_pods, consolidate, most_pods, starts)
            text = replays.run(replays.SimulateOptions(directory, pods, compared, *how))
        click.echo(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@contextmanager
def _simulation_errors() -> Iterator[None]:
    """Turn the errors of a simulation into those of the command line."""
    try:
        with scheduler_extra("simulate"):
            from aliquot_lab.simulate.run import PolicyError
            from aliquot_lab.simulate.timeline.command import ReportError
            from aliquot_lab.simulate.trace import TraceError
    except MissingExtraError as exc:
        raise click.ClickException(str(exc)) from exc
    try:
        yield
    except PolicyError as exc:
        raise click.BadParameter(str(exc), param_hint="--policy or --baseline") from exc
    except (TraceError, ReportError) as exc:
        raise click.ClickException(str(exc)) from exc


def _expect_no(*options: tuple[str, object], mode: str) -> None:
    """Check that options of another mode are not set. Raises UsageError."""
    if found := [name for name, value in options if value]:
        raise click.UsageError(f"{', '.join(found)} cannot be used with {mode}")
