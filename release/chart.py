# SPDX-License-Identifier: Apache-2.0
"""The packaged chart, as ``helm package`` would make it: links replaced by the files behind them, without what .helmignore names.

It comes twice: as the file that ``helm install`` takes, and as the OCI artifact that ``helm push`` would make of it.
"""

import json
from fnmatch import fnmatch
from pathlib import Path

import yaml

from release.archive import write_artifact
from release.source import Source
from release.tarball import entries_below, write_tarball

_CONFIG = "application/vnd.cncf.helm.config.v1+json"
_CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
"""Helm's media types: https://helm.sh/docs/topics/registries/."""


def write_chart(source: Source, out: Path) -> Path:
    """Write ``aliquot-VERSION.tgz``; return its path."""
    chart = source.root / "deploy/helm/aliquot"
    lines = (chart / ".helmignore").read_text().splitlines()
    patterns = [f"aliquot/{line}" for line in lines if line and not line.startswith("#")]
    entries = entries_below(chart, "aliquot")
    kept = {path: entry for path, entry in entries.items() if not any(fnmatch(path, pattern) for pattern in patterns)}
    target = out / f"aliquot-{source.version}.tgz"
    write_tarball(target, kept, epoch=source.epoch)
    return target


def write_chart_archive(source: Source, packed: Path, out: Path) -> Path:
    """Write ``aliquot-chart-VERSION.tar``, an OCI archive of the packaged chart; return its path."""
    metadata = yaml.safe_load((source.root / "deploy/helm/aliquot/Chart.yaml").read_text())
    target = out / f"aliquot-chart-{source.version}.tar"
    config = json.dumps(metadata, sort_keys=True).encode()
    write_artifact(target, f"charts/aliquot:{source.version}", (_CONFIG, config), (_CONTENT, packed.read_bytes()))
    return target
