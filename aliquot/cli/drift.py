"""``aliquot drift``: what differs on the nodes between what was promised, what is held and what is used, as their agents found it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import click

from aliquot.cli import exit_codes
from aliquot.cli.access import Target, connect
from aliquot.cli.errors import AccessError, NotFoundError
from aliquot.cli.options import cluster_options, namespace_options, node_option, output_option
from aliquot.cli.output import UNKNOWN, Cell, Column, Output, document, table
from aliquot.cli.source import AGENT_LABEL, AGENT_NAME, NO_AGENT, agent_pages, agents, gpu_node_names


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that an agent found: a drift of its records, or a finding of its audit."""

    node: str
    source: str
    kind: str
    namespace: str
    pod: str
    container: str
    seconds: float
    cure: str
    message: str


COLUMNS: Sequence[Column[Difference]] = (
    Column("NODE", lambda one: one.node),
    Column("KIND", lambda one: Cell(one.kind, "red" if one.source == "audit" else "yellow")),
    Column("POD", lambda one: f"{one.namespace}/{one.pod}" if one.pod else UNKNOWN),
    Column("CONTAINER", lambda one: one.container or UNKNOWN),
    Column("FOR", lambda one: f"{one.seconds:.0f}s"),
    Column("CURE", lambda one: one.cure or UNKNOWN),
    Column("FOUND BY", lambda one: "audit" if one.source == "audit" else "reconciler", wide=True),
    Column("WHAT", lambda one: one.message),
)


@click.command(name="drift")
@node_option
@namespace_options
@output_option
@cluster_options
def command(*, node_names: tuple[str, ...], namespace: str | None, output: Output, target: Target) -> None:
    """Show what differs on the nodes with GPUs.

    The status is 4 when something does, and 1 when an agent did not answer, a node with GPUs has none, or there is no such node.
    """
    cluster = connect(target)
    running = agents(cluster)
    known = sorted(running.keys() | gpu_node_names(cluster))
    if not known:
        raise AccessError(f"expected nodes with GPUs: found neither a gpunode nor a pod with label {AGENT_LABEL}={AGENT_NAME}")
    if missing := [name for name in node_names if name not in known]:
        raise NotFoundError(f"no node with GPUs is named {', '.join(missing)}; there are {', '.join(known)}")
    chosen = [name for name in known if not node_names or name in node_names]
    pages = agent_pages(cluster, [running[name] for name in chosen if name in running], "/drift")
    told = [one for node, page in sorted(pages.items()) if isinstance(page, str) for one in differences(node, page)]
    found = [one for one in told if namespace in (None, one.namespace)]
    silent = {name: trouble for name in chosen if (trouble := _trouble(pages.get(name)))}
    if not output.for_programs:
        click.echo("\n".join(table(COLUMNS, found, output)) if found else f"nothing differs on {len(chosen) - len(silent)} nodes")
    else:
        click.echo(document({"differences": [asdict(one) for one in found], "silent": silent}, output))
    for node, why in silent.items():
        click.echo(f"{node}: {why}", err=True)
    raise SystemExit(exit_codes.FAILED if silent else exit_codes.FINDINGS if found else exit_codes.OK)


def _trouble(page: str | AccessError | None) -> str:
    """Say why there is no page; nothing where there is one."""
    if page is None:
        return NO_AGENT
    return "" if isinstance(page, str) else page.message


def differences(node: str, page: str) -> list[Difference]:
    """Read an agent's page. Raises AccessError when it is not one."""
    try:
        found = json.loads(page)
        return [
            *(_difference(node, "drift", one) for one in found["drifts"]),
            *(_difference(node, "audit", one) for one in found["findings"]),
        ]
    except (ValueError, KeyError, TypeError) as exc:
        raise AccessError(f"{node}: the agent answers no drift page that this version knows ({exc!r})") from exc


def _difference(node: str, source: str, one: Mapping[str, object]) -> Difference:
    return Difference(
        node,
        source,
        str(one["kind"]),
        str(one.get("namespace", "")),
        str(one.get("pod", "")),
        str(one.get("container", "")),
        float(str(one.get("seconds", 0))),
        str(one.get("cure", "")),
        str(one.get("message", "")),
    )
