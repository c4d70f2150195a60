# SPDX-License-Identifier: Apache-2.0
"""The commands ``why``, ``what-if`` and ``replay``."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from aliquot.contract.model import Policy
from aliquot.process.extras import MissingExtraError, scheduler_extra
from aliquot_cli import exit_codes, live
from aliquot_cli.access import current_namespace
from aliquot_cli.errors import AccessError, NotFoundError
from aliquot_cli.explain.scheduler import SchedulerAccess, scheduler_options
from aliquot_cli.options import output_option
from aliquot_cli.output import Output, document

if TYPE_CHECKING:
    from scheduler_plugin.core.cluster.journal import Snapshot
    from scheduler_plugin.core.explain.why import Why

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(name="why")
@click.argument("pod", shell_complete=live.pods)
@click.option("-n", "--namespace", metavar="NAME", shell_complete=live.namespaces, help="The pod's namespace.  [default: the context's]")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Also save the latest decision on the pod, for replay.")
@output_option
@scheduler_options
def why(*, pod: str, namespace: str | None, save: Path | None, output: Output, scheduler: SchedulerAccess) -> None:
    """Show where a pod runs, or why it waits: what the nodes lack, and the smallest change that makes it fit.

    POD is a name, or NAMESPACE/NAME. The status is 4 when the pod fits nowhere, its gang cannot start, or scheduling gates
    hold it back.
    """
    with scheduler_code("why"):
        from aliquot_cli.explain.show import why_lines
        from scheduler_plugin.core.explain.why import Why

    namespace, _, name = pod.rpartition("/") if "/" in pod else (namespace or namespace_of(scheduler), "", pod)
    answer = _best_answer(scheduler.pages("/explain/why", namespace=namespace, pod=name), Why)
    if save is not None:
        write_saved(save, scheduler.page("/decisions/record", namespace=namespace, pod=name).encode())
    click.echo(document(msgspec.to_builtins(answer), output) if output.for_programs else "\n".join(why_lines(answer)))
    raise SystemExit(exit_codes.FINDINGS if answer.waits else exit_codes.OK)


def _best_answer(texts: Iterable[str], kind: "type[Why]") -> "Why":
    """Return the reply of the replica that knows most. One of another version, as during an update, is passed over. Raises AccessError."""
    answers: list[Why] = []
    unknown: Exception | None = None
    for text in texts:
        try:
            answers.append(msgspec.json.decode(text, type=kind))
        except msgspec.MsgspecError as exc:
            unknown = exc
            continue
        if _is_whole(answers[-1]):
            break  # the other replicas know no more
    if not answers:
        raise AccessError(
            f"the scheduler's explanation has an unknown format: {unknown}; use the aliquot command of the scheduler's version"
        ) from unknown
    return max(reversed(answers), key=lambda one: (_knows_holds(one), not one.not_checked))


def _is_whole(answer: "Why") -> bool:
    """Whether a replica gave kube-scheduler's answer, and knows for whom room is held if the pod waits. An earlier leader does not."""
    return not answer.not_checked and (_knows_holds(answer) or not answer.waits)


def _knows_holds(answer: "Why") -> bool:
    return answer.start is not None or bool(answer.held)


@click.command(name="what-if")
@click.option("--add", "manifests", type=FILE, multiple=True, help="Place the pods of a manifest; can be repeated.")
@click.option(
    "--drain",
    "drained",
    metavar="NODE",
    multiple=True,
    shell_complete=live.nodes,
    help="Drain a node, and place its GPU pods elsewhere; can be repeated.",
)
@click.option(
    "--cordon", "cordoned", metavar="UUID", multiple=True, shell_complete=live.uuids, help="Keep new pods off a GPU; can be repeated."
)
@click.option("--policy", type=click.Choice([str(policy) for policy in Policy]), help="Placement of pods without an annotation for it.")
@click.option("--snapshot", type=FILE, help="Use a saved snapshot instead of the live cluster.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Save the snapshot that was used.")
@click.option("--adopt-nvidia-gpu", is_flag=True, help="Treat plain nvidia.com/gpu as the scheduler does with adoptNvidiaGpu.")
@output_option
@scheduler_options
def what_if(
    *,
    manifests: tuple[Path, ...],
    drained: tuple[str, ...],
    cordoned: tuple[str, ...],
    policy: str | None,
    snapshot: Path | None,
    save: Path | None,
    adopt_nvidia_gpu: bool,
    output: Output,
    scheduler: SchedulerAccess,
) -> None:
    """Try changes on a copy of the cluster's state: cordons first, then drains, then new pods. The cluster stays unchanged.

    A pod fits where a node has enough GPUs, CPU and RAM. The last line names what kube-scheduler also checks and a
    snapshot does not contain. The status is 4 when a pod fits nowhere.
    """
    with scheduler_code("what-if"):
        from aliquot_cli.explain.manifests import pods_of
        from aliquot_cli.explain.show import age_lines, figure_lines, not_checked_line, placement_line
        from scheduler_plugin.core.explain.what_if import WhatIf
        from scheduler_plugin.core.fit.kube_filters import NOT_CHECKED

    taken = read_snapshot(snapshot, save, scheduler)
    with snapshot_errors():
        trial = WhatIf(taken, Policy(policy) if policy else None)
        before = trial.figures()
        for uuid in cordoned:
            trial.cordon(uuid)
        placements = [*trial.drain(drained)]
        placements += trial.add([pod for path in manifests for pod in pods_of(path, trial.gpu_nodes, adopt_nvidia_gpu)])
    after = trial.figures()
    if output.for_programs:
        answer = {"placements": placements, "before": before, "after": after, "not_checked": NOT_CHECKED}
        click.echo(document(msgspec.to_builtins(answer), output))
    else:
        placed = (placement_line(placement, wide=output is Output.WIDE) for placement in placements)
        lines = [*placed, *figure_lines(before, after), *age_lines(taken.generation, taken.age_seconds), not_checked_line()]
        click.echo("\n".join(lines))
    raise SystemExit(exit_codes.OK if all(placement.node for placement in placements) else exit_codes.FINDINGS)


def read_snapshot(file: Path | None, save: Path | None, scheduler: SchedulerAccess) -> "Snapshot":
    """Read a snapshot from the file, or from the scheduler without one; also write it to ``save``. Raises click.ClickException."""
    from scheduler_plugin.core.cluster.journal import Snapshot
    from scheduler_plugin.core.explain.replay import SnapshotError, read_document

    data = file.read_bytes() if file is not None else scheduler.page("/explain/snapshot").encode()
    if save is not None:
        write_saved(save, data)
    try:
        return read_document(data, Snapshot)
    except SnapshotError as exc:
        raise click.ClickException(f"{file or 'the snapshot from the scheduler'}: {exc}") from exc


@contextmanager
def snapshot_errors() -> Iterator[None]:
    """Translate errors about names and snapshots into those of the command line."""
    from scheduler_plugin.core.explain.replay import SnapshotError
    from scheduler_plugin.core.explain.what_if import UnknownNameError

    try:
        yield
    except UnknownNameError as exc:
        raise NotFoundError(str(exc)) from exc
    except SnapshotError as exc:
        raise click.ClickException(str(exc)) from exc


@click.command(name="replay")
@click.argument("file", type=FILE)
@output_option
def replay(*, file: Path, output: Output) -> None:
    """Repeat a scheduler's decision that ``why --save`` recorded, and compare.

    The status is 4 when the installed version decides differently.
    """
    with scheduler_code("replay"):
        from scheduler_plugin.core.explain.replay import Recorded, SnapshotError, read_document
        from scheduler_plugin.core.explain.replay import replay as repeat

    try:
        recorded = read_document(file.read_bytes(), Recorded)
        replayed = repeat(recorded)
    except SnapshotError as exc:
        raise click.ClickException(f"{file}: {exc}") from exc
    if output.for_programs:
        click.echo(document(msgspec.to_builtins({"answer": replayed.answer, "differences": replayed.differences}), output))
    else:
        answer, pod = replayed.answer, recorded.pod
        rated = f" with score {answer.score}" if answer.score else ""
        where = f"node {answer.chosen}{rated}" if answer.chosen else answer.refusal or "no node chosen"
        click.echo(f"{pod.namespace}/{pod.name}: {answer.fitting} of {len(recorded.asked)} nodes fit, {where}")
        click.echo("same as recorded" if not replayed.differences else "differs: " + "; ".join(replayed.differences))
    raise SystemExit(exit_codes.FINDINGS if replayed.differences else exit_codes.OK)


@contextmanager
def scheduler_code(command: str) -> Iterator[None]:
    """Import the scheduler's code inside the block. Raises click.ClickException where its packages are not installed."""
    try:
        with scheduler_extra(command):
            yield
    except MissingExtraError as exc:
        raise click.ClickException(str(exc)) from exc


def write_saved(path: Path, data: bytes) -> None:
    """Write the file that --save names. Raises click.BadParameter."""
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise click.BadParameter(f"{path} cannot be written: {exc.strerror}", param_hint="--save") from exc


def namespace_of(scheduler: SchedulerAccess) -> str:
    """Return the namespace of pods that are named without one."""
    return "default" if scheduler.url else current_namespace(scheduler.target)
