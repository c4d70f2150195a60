# SPDX-License-Identifier: Apache-2.0
"""Partitions through the real nvidia-ml-py on the simulated driver; in a child, because one process can load one NVML."""

from typing import Any

import pytest

from tests.fakes.nvml_child import NvmlChild

CHILD = """
import asyncio, json, sys
from dataclasses import asdict
from agent.adapters.nvml.driver import NvmlDriver
from agent.adapters.nvml.mig import NvmlMig
from agent.errors import DriverError
import pynvml
from aliquot.contract.codec import decode_place

async def main():
    errors = []
    driver = NvmlDriver(sys.argv[1], 5.0, lambda call, code: errors.append(call), lambda seconds: None)
    mig = NvmlMig(driver)
    reading = await driver.read()
    gpus = [entry.device.uuid for entry in reading.devices]
    for line in sys.stdin:
        command, *words = line.split()
        try:
            answer = await do(mig, driver, gpus, errors, command, words)
        except DriverError as exc:
            answer = [type(exc).__name__, str(exc)]
        print(json.dumps(answer), flush=True)

async def do(mig, driver, gpus, errors, command, words):
    if command == "errors":
        return errors
    if command == "keep-out":
        await driver.keep_out(" ".join(words))
        try:
            return pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as exc:
            return str(exc)
    gpu = gpus[int(words[0])]
    if command == "places":
        return [asdict(place) for place in await mig.places(gpu)]
    if command == "read":
        return [[one.profile, one.placement_start, one.uuid] for one in (await driver.read()).devices[int(words[0])].device.mig_instances]
    place = decode_place(f"{gpu}/{words[1]}")
    if command == "create":
        return asdict(await mig.create(place, int(words[2])))
    if command == "at":
        found = await mig.instance_at(place)
        return found and asdict(found)
    return await mig.destroy(place)

asyncio.run(main())
"""


@pytest.fixture
def node(build_dir, sim_node):
    child = NvmlChild(CHILD, build_dir / "lib/sim/libnvidia-ml.so.1", sim_node("a100x8-mig"))
    yield child
    child.close()


def test_places_are_those_the_driver_names(node):
    places = node.ask("places", 0)
    by_profile: dict[str, Any] = {}
    for one in places:
        by_profile.setdefault(one["profile"], []).append(one["placement_start"])
    assert by_profile == {
        "1g.10gb": [0, 1, 2, 3, 4, 5, 6],
        "1g.10gb+me": [0, 1, 2, 3, 4, 5, 6],
        "1g.20gb": [0, 2, 4, 6],
        "2g.20gb": [0, 2, 4],
        "3g.40gb": [0, 4],
        "4g.40gb": [0],
        "7g.80gb": [0],
    }
    sizes = {one["profile"]: (one["placement_size"], one["most_on_device"]) for one in places}
    small = {"1g.10gb": (1, 7), "1g.10gb+me": (1, 1), "1g.20gb": (2, 4), "2g.20gb": (2, 3)}
    assert sizes == {**small, "3g.40gb": (4, 2), "4g.40gb": (4, 1), "7g.80gb": (8, 1)}
    engines = {one["profile"]: one["engines"] for one in places}
    assert engines["1g.10gb"] == [0, 0, 0, 0]
    assert (engines["1g.10gb+me"], engines["3g.40gb"], engines["7g.80gb"]) == ([1, 0, 1, 1], [2, 0, 0, 0], [5, 0, 1, 1])
    assert all(one["uuid"] == f"{one['parent_uuid']}/{one['profile']}@{one['placement_start']}" for one in places)
    assert node.ask("errors") == []


def test_an_instance_is_made_found_and_removed(node):
    node.ask("destroy", 7, "3g.40gb@4")
    assert node.ask("at", 7, "2g.20gb@4") is None
    made = node.ask("create", 7, "2g.20gb@4", 2)
    assert made["uuid"].startswith("MIG-")
    assert node.ask("at", 7, "2g.20gb@4") == made
    assert ["2g.20gb", 4, made["uuid"]] in node.ask("read", 7)
    node.ask("destroy", 7, "2g.20gb@4")
    assert node.ask("at", 7, "2g.20gb@4") is None
    assert node.ask("destroy", 7, "2g.20gb@4") is None


def test_an_instance_made_again_has_another_uuid(node):
    node.ask("destroy", 7, "3g.40gb@4")
    first = node.ask("create", 7, "3g.40gb@4", 4)
    node.ask("destroy", 7, "3g.40gb@4")
    assert node.ask("create", 7, "3g.40gb@4", 4)["uuid"] != first["uuid"]


def test_instance_of_another_owner_is_found_at_its_place(node):
    found = node.ask("at", 7, "3g.40gb@4")
    assert found["uuid"] in {uuid for _, _, uuid in node.ask("read", 7)}
    assert node.ask("at", 7, "3g.40gb@0") is None


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (("create", 7, "2g.20gb@4", 2), "another instance"),
        (("create", 7, "5g.50gb@0", 4), "has no MIG profile 5g.50gb, only 1g.10gb, 2g.20gb"),
    ],
)
def test_failed_creation_is_reported_with_its_reason(node, question, words):
    kind, message = node.ask(*question)
    assert kind == "PartitionError"
    assert words in message


def test_no_session_is_open_or_opened_while_agent_is_kept_out(node):
    assert node.ask("keep-out", "mig-manager", "is", "at", "work") == "Uninitialized"
    for question in (("read", 6), ("places", 6), ("at", 6, "1g.10gb/0")):
        assert node.ask(*question) == ["DriverLeftError", "mig-manager is at work"]
    assert node.ask("keep-out") == "Uninitialized"
    assert len(node.ask("read", 6)) == 7


A30 = """\
topology name=a30
driver   version=580.159.03 cuda=13.0
numa     0 cpus=0-15
model    a30 name="NVIDIA A30" brand=nvidia architecture=ampere compute=8.0 part=x vbios=x memory=24576MiB reserved=421MiB bar1=32768MiB \\
         context=300MiB l2=24MiB bus-bits=3072 ecc=on sms=56 cores=3584 clock=1440MHz memory-clock=1215MHz video-clock=1305MHz \\
         idle-clock=210MHz idle-memory-clock=1215MHz power-idle=28W power-limit=165W power-min=100W power-max=165W temperature-idle=30C \\
         temperature-busy=60C temperature-slowdown=92C temperature-shutdown=95C device-id=0x20b710de subsystem-id=0x153210de \\
         pcie-generation=4 pcie-width=16 mig=4-slices mig-memory=5952MiB,11968MiB,23936MiB,23936MiB mig-sms=14,14,28,28,56,56 mig-mode=on
gpu      0 model=a30 pci=0000:17:00.0 numa=0 bridge=0 port=0 switch=0
"""


def test_reported_media_engines_explain_the_refusal(build_dir, sim_node, tmp_path):
    topology = tmp_path / "a30"
    topology.write_text(A30)
    node = NvmlChild(CHILD, build_dir / "lib/sim/libnvidia-ml.so.1", sim_node(str(topology)))
    try:
        engines = {one["profile"]: one["engines"] for one in node.ask("places", 0)}
        assert engines == {
            "1g.6gb": [1, 0, 0, 0],
            "1g.6gb+me": [1, 0, 1, 1],
            "2g.12gb": [2, 0, 0, 0],
            "2g.12gb+me": [2, 0, 1, 1],
            "4g.24gb": [4, 0, 1, 1],
        }
        assert node.ask("create", 0, "1g.6gb+me@0", 1)["uuid"]
        assert node.ask("create", 0, "2g.12gb+me@2", 2)[0] == "PartitionError"
        assert node.ask("create", 0, "2g.12gb@2", 2)["uuid"]
    finally:
        node.close()
