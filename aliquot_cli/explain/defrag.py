# SPDX-License-Identifier: Apache-2.0
"""The commands ``defrag plan`` and ``defrag check``. Both work on a copy of the cluster's state, and change nothing."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from aliquot.kube.requests import eviction, pod_path, with_options
from aliquot_cli import exit_codes, live
from aliquot_cli.access import ApiCluster, connect
from aliquot_cli.errors import AccessError, NotFoundError
from aliquot_cli.explain.commands import FILE, namespace_of, read_snapshot, scheduler_code, snapshot_errors, write_saved
from aliquot_cli.explain.scheduler import SchedulerAccess, scheduler_options
from aliquot_cli.options import output_option
from aliquot_cli.output import Output, document

if TYPE_CHECKING:
    from scheduler_plugin.core.cluster.journal import Snapshot
    from scheduler_plugin.core.cluster.pods import PodFacts
    from scheduler_plugin.core.consolidate.plan import Goal, NoPlan, Plan

MAX_TRIED = 20
"""Waiting pods for which a plan is searched when the user names none."""
_SECONDS_PER_HOUR = 3600


@click.group(name="defrag", context_settings={"help_option_names": ["-h", "--help"]})
def defrag() -> None:
    """Plan moves of running pods that free room on one node, and check such a plan. The cluster stays unchanged."""


@defrag.command(name="plan")
@click.argument("pod", required=False, shell_complete=live.pods)
@click.option("-n", "--namespace", metavar="NAME", shell_complete=live.namespaces, help="The pod's namespace.  [default: the context's]")
@click.option("--whole-nodes", type=click.IntRange(1), metavar="N", help="Free N nodes of all pods with GPUs, for no pod in particular.")
@click.option("--snapshot", type=FILE, help="Use a saved snapshot instead of the live cluster.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Save the plan with its state, for defrag check.")
@output_option
@scheduler_options
def plan_moves(
    *,
    pod: str | None,
    namespace: str | None,
    whole_nodes: int | None,
    snapshot: Path | None,
    save: Path | None,
    output: Output,
    scheduler: SchedulerAccess,
) -> None:
    """Show the moves that free a place for POD, each with the seat that is kept before a pod ends, and what they cost.

    POD is a name, or NAMESPACE/NAME. Without it, the plan is for the most important waiting pod that moves help. Only pods
    move that state aliquot.dev/movable: true, or have the priority of aliquot-best-effort. On a live cluster, a dry run of
    each eviction asks the API server whether the disruption budgets allow it now. The status is 4 without a plan, and when
    an eviction is refused.
    """
    with scheduler_code("defrag"):
        from scheduler_plugin.core.consolidate.certificate import certify
        from scheduler_plugin.core.consolidate.plan import Plan
    if pod is not None and whole_nodes is not None:
        raise click.UsageError("give a pod or --whole-nodes, not both")
    taken = read_snapshot(snapshot, None, scheduler)
    full_name = None if pod is None else _full_name(pod, namespace, scheduler)
    with snapshot_errors():
        found = _first_plan(taken, _goals(taken, full_name, whole_nodes), output)
        if save is not None and isinstance(found, Plan):
            write_saved(save, msgspec.json.encode(certify(taken, found)))
    refused = None
    if isinstance(found, Plan) and snapshot is None and not scheduler.url:
        refused = refused_evictions(connect(scheduler.target), found)
    _show_end(found, refused, output)
    raise SystemExit(exit_codes.FINDINGS if refused or not isinstance(found, Plan) else exit_codes.OK)


def _show_end(found: "Plan | NoPlan | None", refused: Mapping[str, str] | None, output: Output) -> None:
    """Print what comes after the plans, or the document for programs. Args: refused: None without dry runs."""
    if output.for_programs:
        shown = msgspec.to_builtins(found)
        click.echo(document(shown if refused is None else {**shown, "refused_evictions": refused}, output))
    elif found is None:
        click.echo("no pod with a GPU request waits")
    elif refused is not None:
        click.echo("\n".join(_dry_run_lines(refused)))


@defrag.command(name="check")
@click.argument("file", type=FILE)
def check_plan(*, file: Path) -> None:
    """Replay a saved plan without a cluster: each step must be feasible, and the end the same.

    The status is 4 when the plan does not replay, because it was changed or the installed version decides differently.
    """
    with scheduler_code("defrag"):
        from scheduler_plugin.core.consolidate.certificate import Certificate, CertificateError, check
    try:
        certificate = msgspec.json.decode(file.read_bytes(), type=Certificate)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as exc:
        raise click.ClickException(f"{file}: expected a plan that defrag plan --save wrote: {exc}") from exc
    try:
        with snapshot_errors():
            check(certificate)
    except CertificateError as exc:
        click.echo(f"{file}: the plan does not replay: {exc}")
        raise SystemExit(exit_codes.FINDINGS) from exc
    click.echo(f"{file}: {len(certificate.plan.moves)} moves replay to the same end, and each step is feasible")


def _goals(taken: "Snapshot", pod: str | None, whole_nodes: int | None) -> "Iterator[tuple[str, Goal]]":
    """Yield what to plan for, with its name. Raises NotFoundError."""
    from scheduler_plugin.core.consolidate.plan import Goal

    if whole_nodes is not None:
        yield f"{whole_nodes} whole nodes", Goal(whole_nodes=whole_nodes)
        return
    waiting = sorted(_waiting(taken), key=lambda other: (-other.priority, _name(other)))
    chosen = [other for other in waiting if pod in (None, _name(other))]
    if pod is not None and not chosen:
        raise NotFoundError(f"no pod {pod} with a GPU request waits: check its name and namespace, and whether it is bound")
    yield from ((_name(other), Goal(other.uid)) for other in chosen[:MAX_TRIED])


def _full_name(pod: str, namespace: str | None, scheduler: SchedulerAccess) -> str:
    return pod if "/" in pod else f"{namespace or namespace_of(scheduler)}/{pod}"


def _first_plan(taken: "Snapshot", goals: "Iterable[tuple[str, Goal]]", output: Output) -> "Plan | NoPlan | None":
    """Search until one of the goals has a plan, and show people each result; return the last one, None without a goal."""
    from scheduler_plugin.core.consolidate.plan import Plan, find_plan

    found: Plan | NoPlan | None = None
    for subject, goal in goals:
        found = find_plan(taken, goal)
        if not output.for_programs:
            click.echo("\n".join(_lines(subject, found, wide=output is Output.WIDE)))
        if isinstance(found, Plan):
            break
    return found


def refused_evictions(cluster: ApiCluster, plan: "Plan") -> Mapping[str, str] | None:
    """Try the evictions of a plan by dry runs.

    Returns: why the API server refuses some, by ``namespace/name``; None if it does not answer, or this user has no right to ask.
    """
    refused = {}
    for move in plan.moves:
        namespace, _, name = move.pod.partition("/")
        path = with_options(pod_path(namespace, name, "eviction"), dryRun="All")
        try:
            cluster.post(path, eviction(namespace, name, move.pod_uid, dry_run=True))
        except NotFoundError as exc:
            refused[move.pod] = exc.message
        except AccessError as exc:
            if exc.status in (0, 401) or (exc.status == 403 and "cannot create resource" in exc.message):
                click.echo(f"no dry runs of the Eviction API: {exc.message}", err=True)
                return None
            refused[move.pod] = exc.message
    return refused


def _dry_run_lines(refused: Mapping[str, str]) -> Iterator[str]:
    if not refused:
        yield "dry runs of the Eviction API: each eviction is allowed now"
        return
    yield "dry runs of the Eviction API: these are refused, so the scheduler would not begin now:"
    yield from (f"  {pod}: {why}" for pod, why in refused.items())


def _waiting(taken: "Snapshot") -> "list[PodFacts]":
    from scheduler_plugin.core.explain.replay import restore

    return [pod for pod in restore(taken).pods.values() if pod.gpu is not None and not pod.node_name and pod.may_start]


def _name(pod: "PodFacts") -> str:
    return f"{pod.namespace}/{pod.name}"


def _lines(subject: str, found: "Plan | NoPlan", *, wide: bool) -> Iterator[str]:
    """Describe a plan, or why there is none."""
    from scheduler_plugin.core.consolidate.plan import Plan

    if not isinstance(found, Plan):
        yield f"{subject}: no plan: {found.sentence}"
        yield from (f"  {count:>6}  {why}" for why, count in sorted(found.nodes.items(), key=lambda item: (-item[1], item[0])))
        return
    yield f"{subject}: {_counted(len(found.moves), 'move')} free{'s' * (len(found.moves) == 1)} {_what(found)}"
    for number, move in enumerate(found.moves, 1):
        seat = f" ({', '.join(sorted(move.seat))})" if wide else ""
        lost = move.lost_gpu_seconds / _SECONDS_PER_HOUR
        yield f"  {number}. {move.pod}: node {move.from_node} -> {move.to_node}{seat}, {move.gpus:.2g} GPUs, loses {lost:.1f} GPU-hours"
    yield f"lost in all: {found.lost_gpu_seconds / _SECONDS_PER_HOUR:.1f} GPU-hours of work since start or last checkpoint"
    yield "a seat is kept for every pod before the first one ends; disruption budgets are checked again before each"


def _what(found: "Plan") -> str:
    if found.goal.whole_nodes:
        return f"these nodes: {', '.join(found.nodes)}"
    return f"{_counted(len(found.place), 'GPU')} on node {found.nodes[0]}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
