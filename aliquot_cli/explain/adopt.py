# SPDX-License-Identifier: Apache-2.0
"""The command ``adopt report``."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aliquot_cli import exit_codes
from aliquot_cli.access import Target, connect
from aliquot_cli.explain.commands import scheduler_code
from aliquot_cli.options import cluster_options, namespace_options, output_option
from aliquot_cli.output import UNKNOWN, Column, Output, document, table, terminal_width
from aliquot_cli.source import gpu_nodes

if TYPE_CHECKING:
    from aliquot_cli.explain.adoption import Row

FILES = click.Path(path_type=Path, exists=True, allow_dash=True)
COLUMNS: "Sequence[Column[Row]]" = (
    Column("NAMESPACE", lambda row: row.namespace or UNKNOWN),
    Column("OBJECT", lambda row: row.object),
    Column("PODS", lambda row: str(row.pods), wide=True),
    Column("SYSTEM", lambda row: row.system or UNKNOWN),
    Column("TODAY", lambda row: row.today),
    Column("WOULD BE", lambda row: row.outcome),
    Column("AS", lambda row: row.text, is_sentence=True),
    Column("WARNINGS", lambda row: "; ".join(row.warnings) or UNKNOWN, wide=True, is_sentence=True),
)
SUFFIXES = (".yaml", ".yml", ".json")


@click.group(name="adopt", context_settings={"help_option_names": ["-h", "--help"]})
def adopt() -> None:
    """See what Aliquot would make of pods that were written for HAMi, KAI, Run:ai, Volcano, vgpu-manager or NVIDIA's plugin."""


@adopt.command(name="report")
@click.option(
    "-f", "--filename", "paths", type=FILES, multiple=True, help="Manifests, a folder of them, or - for standard input; no cluster is read."
)
@click.option("--adopt-nvidia-gpu", is_flag=True, help="Treat plain nvidia.com/gpu as the component adopt-nvidia-gpu does.")
@namespace_options
@output_option
@cluster_options
def report(*, paths: tuple[Path, ...], adopt_nvidia_gpu: bool, namespace: str | None, output: Output, target: Target) -> None:
    """Show what every pod and pod template would become if its namespace were adopted. Nothing is changed.

    TODAY says what happens to new pods now: served (in our words, or the pod says something to Aliquot), adopted, left alone,
    dry run, or ignored. The status is 4 when a pod would be refused.
    """
    with scheduler_code("adopt"):
        from aliquot_cli.explain.adoption import REFUSED, Reporter, in_cluster, in_object, namespace_rules, rule_of, summary

    if paths:
        rows = Reporter((), adopt_nvidia_gpu=adopt_nvidia_gpu).rows(
            asked for value in _documents(paths) for asked in in_object(value) if namespace in (None, asked.namespace)
        )
    else:
        cluster = connect(target)
        today = namespace_rules(cluster, rule_of(cluster))
        rows = Reporter(gpu_nodes(cluster).values(), adopt_nvidia_gpu=adopt_nvidia_gpu).rows(in_cluster(cluster, namespace), today)
    if output.for_programs:
        click.echo(document(rows, output))
    else:
        lines = [*table(COLUMNS, rows, output, width=terminal_width()), "", *summary(rows)] if rows else ["no pod asks for NVIDIA GPUs"]
        click.echo("\n".join(lines))
    raise SystemExit(exit_codes.FINDINGS if any(row.outcome == REFUSED for row in rows) else exit_codes.OK)


def _documents(paths: Iterable[Path]) -> Iterator[Any]:
    """Yield the objects of files, of the manifests below folders, and of standard input. Raises click.ClickException."""
    import yaml

    for path in paths:
        for name, text in _texts(path):
            try:
                yield from (value for value in yaml.safe_load_all(text) if value)
            except yaml.YAMLError as exc:
                raise click.ClickException(f"{name}: {exc}") from exc


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    if str(path) == "-":
        yield "standard input", sys.stdin.read()
        return
    files = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file()) if path.is_dir() else [path]
    for file in files:
        try:
            yield str(file), file.read_text()
        except (OSError, UnicodeDecodeError) as exc:
            raise click.ClickException(f"{file}: {exc}") from exc
