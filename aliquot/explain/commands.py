"""The commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from aliquot.cli import exit_codes, live
from aliquot.cli.access import current_namespace
from aliquot.cli.errors import AccessError, NotFoundError
from aliquot.cli.options import output_option
from aliquot.cli.output import Output, document
from aliquot.explain.scheduler import Way, scheduler_options
from program.extras import MissingExtraError, scheduler_extra
from proto.model import Policy

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(name="why")
@click.argument("pod", shell_complete=live.pods)
@click.option("-n", "--namespace", metavar="NAME", shell_complete=live.namespaces, help="The pod's namespace.  [default: the context's]")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Also save the latest decision on the pod, for replay.")
@output_option
@scheduler_options
def why(*, pod: str, namespace: str | None, save: Path | None, output: Output, way: Way) -> None:
    """Say where a pod is, or why it waits: what the nodes lack, and the least that would make it fit.

    POD is a name, or NAMESPACE/NAME. The status is 4 when the pod fits nowhere, its gang cannot start, or scheduling gates
    hold it back.
    """
    with _scheduler_code("why"):
        from aliquot.explain.show import why_lines
        from scheduler_plugin.core.why import Why

    namespace, _, name = pod.rpartition("/") if "/" in pod else (namespace or _namespace(way), "", pod)
    for text in way.pages("/explain/why", namespace=namespace, pod=name):
        try:
            answer = msgspec.json.decode(text, type=Why)
        except msgspec.MsgspecError as exc:
            raise AccessError(f"the scheduler answers no explanation that this version knows: {exc}") from exc
        if not answer.not_checked:
            break  # others would say the same, or know less
    if save is not None:
        _write(save, way.page("/decisions/record", namespace=namespace, pod=name).encode())
    click.echo(document(msgspec.to_builtins(answer), output) if output.for_programs else "\n".join(why_lines(answer)))
    raise SystemExit(exit_codes.FINDINGS if answer.waits else exit_codes.OK)


@click.command(name="what-if")
@click.option("--add", "manifests", type=_FILE, multiple=True, help="Place the pods of a manifest; may be repeated.")
@click.option(
    "--drain",
    "drained",
    metavar="NODE",
    multiple=True,
    shell_complete=live.nodes,
    help="Empty a node and place its GPU pods elsewhere; may be repeated.",
)
@click.option(
    "--cordon", "cordoned", metavar="UUID", multiple=True, shell_complete=live.uuids, help="Keep new pods off a GPU; may be repeated."
)
@click.option("--policy", type=click.Choice([str(policy) for policy in Policy]), help="Placement of pods that name none.")
@click.option("--snapshot", type=_FILE, help="Try it on a saved snapshot instead of the live cluster.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Save the snapshot that was used.")
@click.option("--adopt-nvidia-gpu", is_flag=True, help="Read plain nvidia.com/gpu as the scheduler's setting of that name does.")
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
    way: Way,
) -> None:
    """Try changes on a copy of the cluster: cordons first, then drains, then new pods. Nothing is changed in the cluster.

    A pod fits where a node has the GPUs, the CPU and the RAM; the answer names what else kube-scheduler looks at and a
    snapshot does not have. The status is 4 when a pod would fit nowhere.
    """
    with _scheduler_code("what-if"):
        from aliquot.explain.manifests import pods_of
        from aliquot.explain.show import age_lines, figure_lines, not_checked_line, placement_line
        from scheduler_plugin.core.journal import Snapshot
        from scheduler_plugin.core.kube_filters import NOT_CHECKED
        from scheduler_plugin.core.replay import SnapshotError, read_document
        from scheduler_plugin.core.what_if import UnknownNameError, WhatIf

    data = snapshot.read_bytes() if snapshot is not None else way.page("/explain/snapshot").encode()
    if save is not None:
        _write(save, data)
    try:
        taken = read_document(data, Snapshot)
    except SnapshotError as exc:
        raise click.ClickException(f"{snapshot or 'what the scheduler sent'}: {exc}") from exc
    try:
        trial = WhatIf(taken, Policy(policy) if policy else None)
        before = trial.figures()
        for uuid in cordoned:
            trial.cordon(uuid)
        placements = [*trial.drain(drained)]
        placements += trial.add([pod for path in manifests for pod in pods_of(path, trial.gpu_nodes, adopt_nvidia_gpu)])
    except UnknownNameError as exc:
        raise NotFoundError(str(exc)) from exc
    except SnapshotError as exc:
        raise click.ClickException(str(exc)) from exc
    after = trial.figures()
    if output.for_programs:
        answer = {"placements": placements, "before": before, "after": after, "not_checked": NOT_CHECKED}
        click.echo(document(msgspec.to_builtins(answer), output))
    else:
        placed = (placement_line(placement, wide=output is Output.WIDE) for placement in placements)
        lines = [*placed, *figure_lines(before, after), *age_lines(taken.generation, taken.age_seconds), not_checked_line()]
        click.echo("\n".join(lines))
    raise SystemExit(exit_codes.OK if all(placement.node for placement in placements) else exit_codes.FINDINGS)


@click.command(name="replay")
@click.argument("file", type=_FILE)
@output_option
def replay(*, file: Path, output: Output) -> None:
    """Decide again what a scheduler decided, from a decision that ``why --save`` wrote.

    The status is 4 when today's code decides differently.
    """
    with _scheduler_code("replay"):
        from scheduler_plugin.core.replay import Recorded, SnapshotError, read_document
        from scheduler_plugin.core.replay import replay as decide_again

    try:
        recorded = read_document(file.read_bytes(), Recorded)
        replayed = decide_again(recorded)
    except SnapshotError as exc:
        raise click.ClickException(f"{file}: {exc}") from exc
    if output.for_programs:
        click.echo(document(msgspec.to_builtins({"answer": replayed.answer, "differences": replayed.differences}), output))
    else:
        answer, pod = replayed.answer, recorded.pod
        rated = f" with score {answer.score}" if answer.score else ""
        where = f"node {answer.chosen}{rated}" if answer.chosen else answer.refusal or "no node chosen"
        click.echo(f"{pod.namespace}/{pod.name}: {answer.fitting} of {len(recorded.asked)} nodes fit, {where}")
        click.echo("the same as recorded" if not replayed.differences else "differs: " + "; ".join(replayed.differences))
    raise SystemExit(exit_codes.FINDINGS if replayed.differences else exit_codes.OK)


@contextmanager
def _scheduler_code(command: str) -> Iterator[None]:
    """Import the scheduler's code inside the block. Raises click.ClickException where the packages it needs are not installed."""
    try:
        with scheduler_extra(command):
            yield
    except MissingExtraError as exc:
        raise click.ClickException(str(exc)) from exc


def _write(path: Path, data: bytes) -> None:
    """Write what --save names. Raises click.BadParameter."""
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise click.BadParameter(f"{path} cannot be written: {exc.strerror}", param_hint="--save") from exc


def _namespace(way: Way) -> str:
    return "default" if way.url else current_namespace(way.target)
