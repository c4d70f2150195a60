# SPDX-License-Identifier: Apache-2.0
"""``aliquot doctor`` on a simulated node: the real NVML binding on the simulated driver, a kubelet that answers, a real agent."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from aliquot import contract
from aliquot.paths import SOURCE_ROOT, built
from tests.integration.agent_nodes import container, inject, make_node, manifest, running

pytestmark = pytest.mark.usefixtures("build_dir")


def as_on_a_real_node(node) -> None:
    """Give the node's directory the names they have on a node: links, as distributions make them too."""
    base, layout = node.layout.base, node.layout
    places = {
        "var/lib/kubelet/device-plugins": layout.plugin_dir,
        "var/lib/kubelet/pod-resources": layout.pod_resources_socket.parent,
        "etc/cdi": layout.cdi_static,
        "var/run/cdi": layout.cdi_dynamic,
        "var/lib/aliquot": layout.state,
        "run/aliquot": layout.run,
    }
    for name, real in places.items():
        link = base / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(real, link.parent))


async def doctor(node, status: int) -> dict[str, list[dict[str, str]]]:
    """Run it; return the findings by check."""
    command = [sys.executable, "-m", "aliquot_cli", "doctor", "--root", str(node.layout.base), "-o", "json"]
    command += ["--nvml", str(built("lib/sim/libnvidia-ml.so.1"))]
    environment = {**os.environ, **node.hardware.agent_environment(), contract.ENV_SIM_DIR: str(node.layout.base / "sim")}
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, cwd=SOURCE_ROOT, env=environment, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


async def test_doctor_sees_the_simulated_node_as_it_is():
    async with make_node("a100x8-mig", "--metrics-address=0.0.0.0:0", "--pod-ip=127.0.0.2") as node:
        as_on_a_real_node(node)
        node.create_pod(manifest("a", container(mib=1024)))
        await running(node, "a")
        found = await doctor(node, status=4)  # there is neither a kernel module nor a runtime of containers
        assert "8 x NVIDIA A100" in found["driver.nvml"][0]["found"]
        for check in ("kubelet.device-plugins", "kubelet.pod-resources", "plugins.conflict", "agent.ready"):
            assert found[check][0]["severity"] == "ok", found[check]
        assert "127.0.0.2" in found["agent.ready"][0]["found"], "the agent's listening address is none that the node could ask"
        assert {finding["severity"] for finding in found["shim.image"] if "own system" not in finding["found"]} <= {"ok"}
        errors = {check for check, findings in found.items() if any(one["severity"] == "error" for one in findings)}
        assert {"driver.module", "runtime.socket"} <= errors <= {"driver.module", "runtime.socket", "cdi.nvidia"}
        inject(node, "lost", "--gpu", "0")
        assert any("does not answer" in finding["found"] for finding in (await doctor(node, status=4))["driver.gpu"])
