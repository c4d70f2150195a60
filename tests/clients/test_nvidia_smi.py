# SPDX-License-Identifier: Apache-2.0
"""nvidia-smi of Debian, which reads process lists through NVML's private table."""

import re

import pytest

from tests.clients import harness
from tests.clients.harness import LIMIT_MIB
from tests.fakes.container import Container, Node

pytestmark = [pytest.mark.client("nvidia-smi"), pytest.mark.timeout(240)]

NVLINK = re.compile(r"NV\d+")
PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""What topo -m prints for nvmlDeviceGetTopologyCommonAncestor."""


@pytest.fixture
def smi(client, container):
    """Run nvidia-smi in the container; return its output."""
    return lambda *arguments: harness.run(client, container, [client.program("nvidia-smi"), *arguments]).stdout


@pytest.fixture
def host_smi(client):
    """Run nvidia-smi on a node, without a container; return its output."""
    return lambda node, *arguments: harness.run_on_node(node, [client.program("nvidia-smi"), *arguments])


def pids_in(table: str) -> set[int]:
    """Return the pids of the table that nvidia-smi prints without arguments."""
    return {int(found) for found in re.findall(r"^\|\s+\d+\s+\S+\s+\S+\s+(\d+)\s+[MCG+]+\s", table, re.MULTILINE)}


@pytest.mark.shows("view", "processes")
def test_queries_show_limit_and_own_processes(smi, node: Node, container: Container, record_property):
    """`--query-gpu`, `--query-compute-apps`: memory, devices, processes"""
    with harness.own_and_foreign(node, container) as (own, foreign):
        rows = smi("--query-gpu=memory.total,memory.used,count", "--format=csv,noheader,nounits").split("\n")
        processes = smi("-i", "0", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits").splitlines()
        pids = harness.visible_pids(node, container, own, foreign)
    total, used, count = (int(word) for word in rows[0].split(", "))
    shown = {int(pid): int(used) for pid, used in (line.split(", ") for line in processes)}
    assert count == harness.visible_gpus(node, container)
    assert set(shown) == pids
    assert harness.is_own_memory(container, shown[own])
    if harness.is_limited(container):
        assert (total, used) == (LIMIT_MIB, harness.used_mib(container))
    record_property("found", f"{total:,} MiB")


def test_table_lists_own_processes_by_name(smi, node: Node, container: Container):
    """without arguments: the table of devices and processes"""
    with harness.own_and_foreign(node, container) as (own, foreign):
        table = smi()
        pids = harness.visible_pids(node, container, own, foreign)
    assert pids_in(table) == pids
    assert "aliquot-cuda-client" in table
    if harness.is_limited(container):
        assert f"{harness.used_mib(container)}MiB /  {LIMIT_MIB}MiB" in table


def test_full_report_shows_the_limit(smi, node: Node, container: Container):
    """`-q`: all sections of one GPU, with memory and processes"""
    with harness.own_and_foreign(node, container) as (own, foreign):
        report = smi("-q", "-i", "0")
        pids = harness.visible_pids(node, container, own, foreign)
    assert {int(pid) for pid in re.findall(r"Process ID\s+: (\d+)", report)} == pids
    for section in ("MIG Mode", "PCI", "ECC Errors", "Temperature", "Clocks", "Max Clocks"):
        assert re.search(rf"^ +{section}$", report, re.MULTILINE), section
    if harness.is_limited(container):
        memory = re.search(r"FB Memory Usage\s+Total\s+: (\d+) MiB\s+Reserved\s+: \d+ MiB\s+Used\s+: (\d+) MiB", report)
        assert memory is not None
        assert memory.groups() == (str(LIMIT_MIB), str(harness.used_mib(container)))


@pytest.mark.shows("kill")
def test_kill_removes_process_from_table(smi, container: Container):
    """kill -9 removes the process and its memory"""
    with container.repl() as program:
        assert program.process.pid in pids_in(smi())
        program.kill()
        harness.wait_for(lambda: program.process.pid not in pids_in(smi()))
    if harness.knows_sizes(container):
        assert smi("-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits").strip() == "0"


@pytest.mark.simulated
def test_links_are_the_drivers(smi, node: Node, container: Container):
    """`nvlink -s`, `topo -m`: the links of the visible GPU"""
    links = re.findall(r"Link \d+: (\S+) GB/s", smi("nvlink", "-s"))
    assert len(links) == 18, "an H200 has 18"
    assert re.search(r"^GPU0\s+X ", smi("topo", "-m"), re.MULTILINE)


@pytest.mark.simulated
def test_container_cannot_change_mig_mode(client, container: Container, record_property):
    """`-mig 1` in a container"""
    answer = container.run([client.program("nvidia-smi"), "-i", "0", "-mig", "1"], harness.environment(client))
    if harness.is_limited(container):
        assert answer.status != 0
        assert "permission" in answer.stdout.lower()
        record_property("found", "refused")
    else:
        assert answer.status == 0, answer


@pytest.mark.simulated
def test_mig_instances_are_created_and_destroyed(host_smi, node: Node):
    """`-mig 1`, `mig -lgip -cgi -lgi -lci -dci -dgi`, `-mig 0` on the node"""
    assert "Enabled MIG Mode" in host_smi(node, "-i", "0", "-mig", "1")
    assert "MIG 3g.71gb " in host_smi(node, "mig", "-lgip")
    assert host_smi(node, "mig", "-i", "0", "-cgi", "9,9", "-C").count("Successfully created GPU instance") == 2
    assert host_smi(node, "mig", "-lgi").count("MIG 3g.71gb") == 2
    assert host_smi(node, "mig", "-lci").count("MIG 3g.71gb") == 2
    assert host_smi(node, "-L").count("MIG 3g.71gb") == 2
    assert host_smi(node, "mig", "-dci").count("Successfully destroyed compute instance") == 2
    assert host_smi(node, "mig", "-dgi").count("Successfully destroyed GPU instance") == 2
    assert "Disabled MIG Mode" in host_smi(node, "-i", "0", "-mig", "0")


LEVELS = """
import json, pynvml as n
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
print(json.dumps([[0 if a is b else n.nvmlDeviceGetTopologyCommonAncestor(a, b) for b in handles] for a in handles]))
"""


@pytest.mark.simulated
@pytest.mark.parametrize("profile", harness.PROFILES)
def test_topology_agrees_with_nvml(host_smi, build_dir, sim_node, tmp_path, profile):
    """`topo -m` on the node, for every profile"""
    node = Node(build_dir, sim_node(profile), tmp_path)
    rows = [line.split() for line in host_smi(node, "topo", "-m").splitlines() if re.match(r"GPU\d+\s", line)]
    levels = harness.host_json(node, LEVELS)
    assert len(rows) == len(levels) == len(node.uuids)
    for i, row in enumerate(rows):
        for j, label in enumerate(row[1 : len(rows) + 1]):
            assert (label == "X") if i == j else (NVLINK.fullmatch(label) or label == PATHS[levels[i][j]]), (i, j, label)
