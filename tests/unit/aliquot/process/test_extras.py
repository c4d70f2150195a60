# SPDX-License-Identifier: Apache-2.0
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from aliquot.process.extras import SCHEDULER_PACKAGES, scheduler_extra

ROOT = Path(__file__).parents[4]
WITHOUT = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from {module} import main
sys.argv = {argv!r}
sys.exit(main())
"""
"""A program as it runs where the packages are not installed."""


def run_without(module: str, *argv: str) -> subprocess.CompletedProcess:
    code = WITHOUT.format(packages=set(SCHEDULER_PACKAGES), module=module, argv=list(argv))
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("scheduler_plugin.launch", ["aliquot-scheduler"]),
        ("aliquot_cli.__main__", ["aliquot", "why", "p1", "-n", "team", "--url", "http://127.0.0.1:9"]),
        ("aliquot_cli.__main__", ["aliquot", "what-if", "--snapshot", "pyproject.toml"]),
        ("aliquot_cli.__main__", ["aliquot", "replay", "pyproject.toml"]),
        ("aliquot_cli.__main__", ["aliquot", "simulate", "--links"]),
    ],
    ids=["scheduler", "why", "what-if", "replay", "simulate"],
)
def test_without_the_extra_a_program_says_in_one_sentence_what_to_install(module, argv):
    result = run_without(module, *argv)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert "is not installed: install aliquot[scheduler]" in line


@pytest.mark.parametrize("command", [[], ["demo"], ["doctor"], ["get"], ["top"], ["why"]], ids=" ".join)
def test_help_needs_no_extra(command):
    result = run_without("aliquot_cli.__main__", "aliquot", *command, "--help")
    assert result.returncode == 0, result.stderr


def test_another_missing_module_is_no_matter_of_the_extra():
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"), scheduler_extra("test"):
        importlib.import_module("nothing_of_this_name")


def test_the_extra_names_the_packages_and_the_script_the_launcher():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(entry.partition(">=")[0] for entry in project["optional-dependencies"]["scheduler"]) == sorted(
        SCHEDULER_PACKAGES.values()
    )
    assert project["scripts"]["aliquot-scheduler"] == "scheduler_plugin.launch:main"


WITHOUT_LABORATORY = """
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "aliquot_lab" else real(name, *rest)
from aliquot_cli.__main__ import main
sys.argv = {argv!r}
sys.exit(main())
"""
"""The command line as production images have it."""


@pytest.mark.parametrize("command", ["demo", "simulate"])
def test_without_the_laboratory_a_command_says_where_it_runs(command):
    code = WITHOUT_LABORATORY.format(argv=["aliquot", command])
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert f"{command} needs the package aliquot_lab, which production images do not have" in ended.stderr


def test_without_the_laboratory_help_does_not_list_its_commands():
    code = WITHOUT_LABORATORY.format(argv=["aliquot", "--help"])
    listing = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "doctor" in listing
    assert not {"demo", "simulate"} & set(listing.split())
