# SPDX-License-Identifier: Apache-2.0
"""What a release publishes without root: sdist, wheel, chart and plugin, complete and the same every time."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from release import plugin
from release.__main__ import main
from release.chart import write_chart, write_chart_archive
from release.distributions import write_distributions
from release.platforms import AMD64, ARM64
from release.source import Source, SourceError, export


@pytest.fixture(scope="module")
def distributions(source: Source, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Sdist and wheel, written by the first worker of a run that needs them."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_TESTRUNUID" in os.environ else own
    first, part = shared / "distributions", shared / "distributions-part"
    with (shared / "distributions.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not first.exists():
            part.mkdir(exist_ok=True)
            write_distributions(source, part)
            part.rename(first)
    [sdist], [wheel] = first.glob("*.tar.gz"), first.glob("*.whl")
    return sdist, wheel


def test_distributions_are_the_same_the_second_time(source: Source, distributions: tuple[Path, Path], tmp_path: Path) -> None:
    for first, again in zip(distributions, write_distributions(source, tmp_path), strict=True):
        assert first.name == again.name
        assert first.read_bytes() == again.read_bytes()


def test_sdist_has_every_file_of_the_tree(source: Source, distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as tar:
        packed = {member.name.partition("/")[2] for member in tar}
        assert {member.mtime for member in tar} == {source.epoch}
    tree = {str(path.relative_to(source.root)) for path in source.root.rglob("*") if path.is_file()}
    assert tree - packed == set(), "MANIFEST.in lists what an sdist has"


def test_wheel_has_the_license_and_no_tests(source: Source, distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(f"aliquot-{source.version}.dist-info/METADATA").decode()
    assert f"aliquot-{source.version}.dist-info/licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in metadata
    assert {name.partition("/")[0] for name in names} == {
        *("agent", "aliquot", "aliquot_cli", "aliquot_lab", "scheduler_plugin"),
        f"aliquot-{source.version}.dist-info",
    }


def test_demo_from_an_installed_wheel_says_what_it_needs(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(distributions[1]) as wheel:
        wheel.extractall(site)
    command = [sys.executable, "-P", "-c", "from aliquot_cli.__main__ import main; main(['demo'])"]
    environment = {name: value for name, value in os.environ.items() if name != "ALIQUOT_BUILD_DIR"} | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Run `make native` in the source tree or the unpacked sdist, and set ALIQUOT_BUILD_DIR" in done.stderr


def test_packaged_chart_has_files_instead_of_links(source: Source, tmp_path: Path) -> None:
    packed = write_chart(source, tmp_path)
    with tarfile.open(packed) as tar:
        members = {member.name: member for member in tar}
    assert all(member.isfile() for member in members.values())
    assert {"aliquot/Chart.yaml", "aliquot/LICENSE", "aliquot/daemonset/base/agent.yaml"} <= members.keys()
    assert not [name for name in members if "Dockerfile" in name or name.endswith(("make_dashboards.py", ".helmignore.swp"))]
    first = packed.read_bytes()
    assert write_chart(source, tmp_path).read_bytes() == first


def test_chart_archive_is_the_artifact_that_helm_reads_from_a_registry(source: Source, tmp_path: Path) -> None:
    packed = write_chart(source, tmp_path)
    with tarfile.open(write_chart_archive(source, packed, tmp_path)) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}

    def blob(descriptor: dict[str, str]) -> bytes:
        return files["blobs/sha256/" + descriptor["digest"].removeprefix("sha256:")]

    [named] = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(blob(named))
    [content] = manifest["layers"]
    assert content["mediaType"] == "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
    assert blob(content) == packed.read_bytes()
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.helm.config.v1+json"
    metadata = json.loads(blob(manifest["config"]))
    assert (metadata["name"], metadata["version"]) == ("aliquot", source.version)


@pytest.fixture
def plugin_files(source: Source, distributions: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The plugin, with one small wheel in place of the locked ones."""
    for python in plugin.PYTHONS:
        (tmp_path / python).mkdir()
        with zipfile.ZipFile(tmp_path / python / "both-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("both.py", "")
        with zipfile.ZipFile(tmp_path / python / f"native-1.0-{python}.whl", "w") as wheel:
            wheel.writestr("native.so", python)
    monkeypatch.setattr(plugin, "_wheels", lambda _source, _inputs, _platform, python, **_: sorted((tmp_path / python).glob("*.whl")))
    out = tmp_path / "out"
    out.mkdir()
    return plugin.write_plugin(source, distributions[1], tmp_path, out, [AMD64, ARM64], url="", offline=True)


def test_plugin_manifest_names_each_archive_with_its_checksum(plugin_files: list[Path], source: Source) -> None:
    *archives, manifest = plugin_files
    content = yaml.safe_load(manifest.read_text())
    assert (content["metadata"]["name"], content["spec"]["version"]) == ("vgpu", f"v{source.version}")
    for archive, platform in zip(archives, content["spec"]["platforms"], strict=True):
        assert platform["uri"] == archive.name
        assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
        assert platform["bin"] == "kubectl-vgpu"


def test_plugin_archive_has_shared_and_compiled_packages(plugin_files: list[Path]) -> None:
    with tarfile.open(plugin_files[0]) as tar:
        names = set(tar.getnames())
        assert tar.getmember("kubectl-vgpu").mode == 0o755
    assert {"lib/common/both.py", "lib/common/aliquot_cli/__main__.py", "lib/cp311/native.so", "lib/cp313/native.so"} <= names
    assert "lib/cp311/both.py" not in names


def test_plugin_without_a_python_says_which_it_needs(plugin_files: list[Path], tmp_path: Path) -> None:
    with tarfile.open(plugin_files[0]) as tar:
        tar.extractall(tmp_path / "plugin", filter="data")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("dirname", "readlink", "sh"):
        (tools / tool).symlink_to(Path("/usr/bin") / tool)
    command = [tmp_path / "plugin/kubectl-vgpu"]
    done = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "kubectl vgpu needs Python 3.11 to 3.13" in done.stderr


def test_tree_without_git_needs_a_stated_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    (tmp_path / "tree").mkdir()
    with pytest.raises(SourceError, match="set SOURCE_DATE_EPOCH"):
        export(tmp_path / "tree", tmp_path / "copy")


def test_unknown_platform_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--platforms=amd64,riscv"])
    assert "unknown: 'riscv'; known: amd64, arm64" in capsys.readouterr().err
