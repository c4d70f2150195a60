# SPDX-License-Identifier: Apache-2.0
"""``aliquot drift``: where grants, files, pods and use differ on the nodes, as reported by their agents."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import click

from aliquot_cli import exit_codes
from aliquot_cli.access import Target, connect
from aliquot_cli.errors import AccessError, NotFoundError
from aliquot_cli.options import cluster_options, namespace_options, node_option, output_option
from aliquot_cli.output import UNKNOWN, Cell, Column, Output, document, table, terminal_width
from aliquot_cli.source import AGENT_LABEL, AGENT_NAME, NO_AGENT, agent_pages, agents, gpu_node_names


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference that an agent reports: drift of its ledger, or a finding of its audit."""

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
    Column("MESSAGE", lambda one: one.message, is_sentence=True),
)


@click.command(name="drift")
@node_option
@namespace_options
@output_option
@cluster_options
def command(*, node_names: tuple[str, ...], namespace: str | None, output: Output, target: Target) -> None:
    """Show where grants, files, pods and use differ, as the nodes' agents report it.

    The status is 4 when an agent reports a difference. It is 1 when an agent does not answer, a node with GPUs has no agent, or
    the cluster has no node with GPUs.
    """
    cluster = connect(target)
    running = agents(cluster)
    chosen = _chosen(sorted(running.keys() | gpu_node_names(cluster)), node_names)
    pages = agent_pages(cluster, [running[name] for name in chosen if name in running], "/drift")
    found = [one for one in _reported(pages) if namespace in (None, one.namespace)]
    silent = {name: trouble for name in chosen if (trouble := _trouble(pages.get(name)))}
    click.echo(_report(found, silent, len(chosen), output))
    for node, why in silent.items():
        click.echo(f"{node}: {why}", err=True)
    raise SystemExit(exit_codes.FAILED if silent else exit_codes.FINDINGS if found else exit_codes.OK)


def _reported(pages: Mapping[str, str | AccessError]) -> list[Difference]:
    """Return the differences of all nodes that answered, sorted by node. Raises AccessError."""
    return [one for node, page in sorted(pages.items()) if isinstance(page, str) for one in differences(node, page)]


def _chosen(known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the nodes to query: all, or those named on the command line. Raises AccessError or NotFoundError."""
    if not known:
        raise AccessError(f"expected nodes with GPUs: found neither a gpunode nor a pod with label {AGENT_LABEL}={AGENT_NAME}")
    if missing := [name for name in wanted if name not in known]:
        raise NotFoundError(f"no node with GPUs is named {', '.join(missing)}; there are {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]


def _report(found: Sequence[Difference], silent: Mapping[str, str], nodes: int, output: Output) -> str:
    if output.for_programs:
        return document({"differences": [asdict(one) for one in found], "silent": silent}, output)
    if not found:
        return f"no differences on {nodes - len(silent)} nodes"
    return "\n".join(table(COLUMNS, found, output, width=terminal_width()))


def _trouble(page: str | AccessError | None) -> str:
    """Return why a node has no page; empty where it has one."""
    if page is None:
        return NO_AGENT
    return "" if isinstance(page, str) else page.message


def differences(node: str, page: str) -> list[Difference]:
    """Parse an agent's drift page. Raises AccessError when it is invalid."""
    try:
        found = json.loads(page)
        return [
            *(_difference(node, "drift", one) for one in found["drifts"]),
            *(_difference(node, "audit", one) for one in found["findings"]),
        ]
    except (ValueError, KeyError, TypeError) as exc:
        raise AccessError(
            f"{node}: the agent's drift page has an unknown format ({exc!r}): use the aliquot command of the agent's version"
        ) from exc


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
