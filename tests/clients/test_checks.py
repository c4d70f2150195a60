# SPDX-License-Identifier: Apache-2.0
"""Every client has its checks in every way, so that a new client cannot lack one."""

import subprocess
import sys

import pytest

from tests.clients import checks, page
from tests.clients.installing import ROOT, read_pins

COLLECT = """
import sys, pytest
from tests.clients import checks, page
found = checks.Collected()
status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests/clients"], plugins=[found])
print("unknown checks:", sorted(found.unknown), "missing:", checks.missing(found.cells, page.WAYS), len(found.cells))
sys.exit(status)
"""


def test_every_client_has_a_role():
    named = [name for _, names in checks.ROLES.values() for name in names]
    assert sorted(named) == sorted(read_pins())


def test_every_client_has_its_checks_in_every_way():
    done = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("unknown checks: [] missing: [] "), last
    needed = sum(len(needs) * len(names) for needs, names in checks.ROLES.values()) * len(page.WAYS)
    assert int(last.split()[-1]) >= needed


@pytest.mark.parametrize("lost", [("pycuda", "kill", "front"), ("nvtop", "view", "bare")])
def test_a_check_that_no_test_shows_is_named(lost):
    all_of_them = checks.missing(set(), page.WAYS)
    assert checks.missing(set(all_of_them) - {lost}, page.WAYS) == [lost]
