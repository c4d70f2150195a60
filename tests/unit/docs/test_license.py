# SPDX-License-Identifier: Apache-2.0
"""The license is in every form that leaves the repository: sources, wheel, images, chart."""

import hashlib
import os
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
LICENSE = "Apache-2.0"
LINE = f"SPDX-License-Identifier: {LICENSE}"
SHA256_OF_THE_TEXT = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""Of https://www.apache.org/licenses/LICENSE-2.0.txt."""
SOURCE_SUFFIXES = {".py", ".pyi", ".sh", ".mk", ".c", ".h", ".def", ".S", ".js", ".css", ".proto"}
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")


def source_files() -> list[Path]:
    """Every source file of the tree that people write."""
    found = []
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if name not in ("build", "__pycache__") and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not GENERATED.search(name)]
    return [path for path in found if path.suffix in SOURCE_SUFFIXES or path.name == "Makefile"]


def test_license_is_the_standard_text() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == SHA256_OF_THE_TEXT


def test_every_source_file_names_the_license_at_its_top() -> None:
    files = source_files()
    assert len(files) > 400
    without = [str(path.relative_to(ROOT)) for path in files if LINE not in "\n".join(path.read_text().splitlines()[:2])]
    assert without == [], f"add '{LINE}' as a comment in the first line, after a shebang if there is one"


def test_wheel_images_and_chart_name_the_license() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == (LICENSE, ["LICENSE"])
    chart = ROOT / "deploy/helm/aliquot"
    assert yaml.safe_load((chart / "Chart.yaml").read_text())["annotations"]["artifacthub.io/license"] == LICENSE
    assert (chart / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    final_stage = (ROOT / "deploy/daemonset/Dockerfile").read_text().partition(" AS python\n")[2].partition("\nFROM ")[0]
    assert f"LABEL org.opencontainers.image.licenses={LICENSE}" in final_stage
    assert "COPY LICENSE /usr/share/doc/aliquot/LICENSE" in final_stage
