# SPDX-License-Identifier: Apache-2.0
"""The code path of ``aliquot demo --real`` on a machine without a GPU: the simulated driver takes the place of an installed one.

The driver is found in the loader's cache, the CDI spec is made of device nodes and library files, and processes are kept to their GPU by
CUDA_VISIBLE_DEVICES; only that the driver answers from a simulated node is arranged here.
"""

import subprocess

import msgspec
import pytest

from aliquot import contract
from aliquot_lab.demo.checks import evaluate
from aliquot_lab.demo.plan import REAL_UNIT_LIMIT_BYTES, make_plan
from aliquot_lab.demo.scenario import Scenario
from aliquot_lab.demo.screen import SilentScreen
from aliquot_lab.standin import hardware
from aliquot_lab.standin.hardware import RealHardware
from aliquot_lab.standin.inventory import read_inventory
from aliquot_lab.standin.node import Node, NodeOptions

pytestmark = pytest.mark.timeout(120)
VERSION = "580.159.03"


class InstalledSimulation(RealHardware):
    """Real hardware, where the driver installed on this machine is the simulated one."""

    def __init__(self, sim_dir, library_dir):
        super().__init__()
        self._env = {contract.ENV_SIM_DIR: str(sim_dir), "LD_LIBRARY_PATH": str(library_dir)}

    def agent_environment(self):
        return self._env

    def host_environment(self):
        return self._env

    def cdi_spec(self, inventory):
        spec = super().cdi_spec(inventory)
        edits = msgspec.structs.replace(spec.container_edits, env=(f"{contract.ENV_SIM_DIR}={self._env[contract.ENV_SIM_DIR]}",))
        return msgspec.structs.replace(spec, container_edits=edits)


@pytest.fixture
def installed(build_dir, sim_node, tmp_path, monkeypatch):
    libraries = tmp_path / "lib"
    libraries.mkdir()
    lines = []
    for soname in (contract.CUDA_SONAME, contract.NVML_SONAME):
        file = libraries / soname.replace(".so.1", f".so.{VERSION}")
        file.hardlink_to(build_dir / "lib/sim" / soname)
        (libraries / soname).symlink_to(file.name)
        lines.append(f"\t{soname} (libc6,x86-64) => {libraries / soname}")
    run = subprocess.run

    def run_but_ldconfig(command, *args, **kwargs):
        if str(command[0]).endswith("ldconfig") and command[1:] == ["-p"]:
            return subprocess.CompletedProcess(command, 0, stdout="\n".join(lines), stderr="")
        return run(command, *args, **kwargs)

    monkeypatch.setattr("aliquot_lab.standin.hardware.subprocess.run", run_but_ldconfig)
    monkeypatch.setattr("aliquot_lab.standin.hardware.ctypes.util.find_library", lambda _: contract.NVML_SONAME)
    real = InstalledSimulation(sim_node("t4x2"), libraries)
    monkeypatch.setattr(hardware, "read_inventory", lambda _: read_inventory(real.host_environment()))
    return real


async def test_checks_pass_with_an_installed_driver(installed):
    flags = ("--reconcile-seconds=0.2", "--driver-poll-seconds=0.2")
    async with Node(installed, NodeOptions(agent_flags=flags)) as node:
        plan = make_plan(node.inventory, {}, unit_limit_bytes=REAL_UNIT_LIMIT_BYTES)
        evidence = await Scenario(node, plan, SilentScreen(), seconds=1, keep=False).run()
    assert [check for check in evaluate(evidence) if not check.passed] == []
