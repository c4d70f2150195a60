# SPDX-License-Identifier: Apache-2.0
import json
import re
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from aliquot import contract
from aliquot.contract import gpunode, units
from aliquot.contract.errors import AliquotError, ContractError
from aliquot.contract.gpunode import GpuDevice, GpuNode, IdlePod, PodUtilization, decode_gpu_node, encode_gpu_node
from aliquot.contract.model import Device, Isolation, Link, LinkKind, MediaEngines, MigInstance, Utilization

CRD = Path(__file__).parents[4] / "deploy/daemonset/base/crd-gpunodes.yaml"


def make_device(minor: int = 0, *, mib: int = 143771, **fields) -> Device:
    return Device(f"GPU-{minor}", "NVIDIA H200", minor, f"00000000:{minor:02X}:00.0", mib * units.MIB, **fields)


def make_node(count: int = 2, **fields) -> GpuNode:
    devices = tuple(GpuDevice(make_device(minor)) for minor in range(count))
    return replace(GpuNode("node-1", devices), **fields)


# --- round trips --------------------------------------------------------------------------------------------------

PCIE = [kind for kind in LinkKind if kind is not LinkKind.NVLINK]
texts = st.text(st.characters(codec="utf-8"), max_size=20)
small = st.integers(0, gpunode.MAX_MINOR)
engines = st.none() | st.builds(MediaEngines, small, small, small, small)
uses = st.builds(Utilization, st.integers(0, 100), st.integers(0, 100))
memory = st.integers(1, 1 << 30).map(units.mib_to_bytes)
IDLE = st.builds(lambda uid, ends: IdlePod(uid, *sorted(ends)), texts, st.tuples(*[st.integers(0, gpunode.MAX_SECONDS)] * 2))


@st.composite
def nodes(draw: st.DrawFn) -> GpuNode:
    entries = []
    for index in range(draw(st.integers(0, 5))):
        uuid = f"GPU-{index}"
        instances = tuple(
            MigInstance(
                f"MIG-{index}-{i}",
                uuid,
                draw(texts),
                draw(memory),
                draw(small),
                draw(small),
                draw(small),
                draw(small),
                draw(small),
                draw(engines),
            )
            for i in range(draw(st.integers(0, 2)))
        )
        device = Device(
            uuid=uuid,
            model=draw(texts),
            minor=draw(small),
            pci_bus_id=draw(texts),
            memory_bytes=draw(memory),
            numa_node=draw(st.none() | small),
            compute_capability=draw(st.none() | st.tuples(st.integers(0, 999), st.integers(0, 999))),
            mig_enabled=draw(st.booleans()),
            mig_instances=instances,
        )
        entries.append(GpuDevice(device, draw(texts), draw(texts), draw(texts), draw(texts)))
    links = []
    for a, b in combinations(entries, 2):
        kind = draw(st.none() | st.sampled_from(LinkKind))
        if kind is not None:
            lanes = draw(st.integers(0, gpunode.MAX_LANES)) if kind is LinkKind.NVLINK else 0
            pcie = draw(st.none() | st.sampled_from(PCIE)) if kind is LinkKind.NVLINK else None
            links.append(Link(a.device.uuid, b.device.uuid, kind, lanes, pcie))
    return GpuNode(
        name=draw(st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)),
        devices=tuple(entries),
        links=tuple(links),
        shares_per_gpu=draw(st.integers(1, gpunode.MAX_SHARES_PER_GPU)),
        memory_oversubscription=draw(st.sampled_from([1.0, 1.5, gpunode.MAX_OVERSUBSCRIPTION])),
        isolation=tuple(draw(st.lists(st.sampled_from(Isolation), unique=True))),
        driver_version=draw(texts),
        cuda_version=draw(st.integers(0, 1_000_000)),
        agent_version=draw(texts),
        cordoned=draw(st.booleans()),
        cordoned_devices=tuple(draw(st.lists(st.sampled_from(["GPU-0", "GPU-1", "GPU-gone"]), unique=True))),
        idle=tuple(draw(st.lists(IDLE, unique_by=lambda pod: pod.pod_uid, max_size=3))),
        utilization=tuple(draw(st.lists(st.builds(PodUtilization, texts, uses), max_size=3))),
    )


@given(nodes())
def test_a_node_survives_its_object(node):
    assert decode_gpu_node(encode_gpu_node(node)) == node


@given(nodes(), st.integers(0), st.integers(0, 8), st.binary(max_size=4))
def test_a_damaged_object_decodes_to_a_valid_one_or_is_refused(node, start, length, replacement):
    raw = encode_gpu_node(node)
    start %= len(raw)
    with suppress(ContractError):
        decoded = decode_gpu_node(raw[:start] + replacement + raw[start + length :])
        assert decode_gpu_node(encode_gpu_node(decoded)) == decoded


@given(st.binary() | st.text().map(str.encode))
def test_hostile_bytes_raise_nothing_but_contract_errors(data):
    with suppress(ContractError):
        decode_gpu_node(data)


# --- the form -----------------------------------------------------------------------------------------------------


def test_links_read_like_the_table_people_know():
    node = make_node(3, links=(Link("GPU-0", "GPU-1", LinkKind.NVLINK, 18), Link("GPU-1", "GPU-2", LinkKind.SYSTEM)))
    assert json.loads(encode_gpu_node(node))["status"]["links"] == ["X NV18 -", "NV18 X SYS", "- SYS X"]


def test_pcie_paths_are_in_separate_table_that_older_readers_skip():
    links = (Link("GPU-0", "GPU-1", LinkKind.NVLINK, 4, LinkKind.PCIE_SWITCHES), Link("GPU-1", "GPU-2", LinkKind.SAME_BOARD))
    data = json.loads(encode_gpu_node(make_node(3, links=links)))
    assert data["status"]["links"] == ["X NV4 -", "NV4 X PIX", "- PIX X"]
    assert data["status"].pop("pcie") == ["X PXB -", "PXB X PSB", "- PSB X"]
    found = decode_gpu_node(json.dumps(data).encode())
    assert found.links == (Link("GPU-0", "GPU-1", LinkKind.NVLINK, 4), Link("GPU-1", "GPU-2", LinkKind.PCIE_SWITCH))


def test_engines_missing_from_older_agents_are_unknown():
    device = make_device()
    place = MigInstance(f"{device.uuid}/1g.6gb+me@0", device.uuid, "1g.6gb+me", units.MIB, 0, 0, 0, 1, 1, MediaEngines(1, 0, 1, 1))
    node = make_node(devices=(GpuDevice(replace(device, mig_instances=(place,))),))
    data = json.loads(encode_gpu_node(node))
    (instance,) = data["status"]["devices"][0]["migInstances"]
    assert instance.pop("engines") == {"decoders": 1, "jpegs": 1, "ofas": 1}
    (found,) = decode_gpu_node(json.dumps(data).encode()).devices[0].device.mig_instances
    assert found == replace(place, engines=None)


def test_pcie_paths_are_written_once_when_one_table_suffices():
    node = make_node(3, links=(Link("GPU-0", "GPU-1", LinkKind.PCIE_SWITCH), Link("GPU-1", "GPU-2", LinkKind.SYSTEM)))
    assert "pcie" not in json.loads(encode_gpu_node(node))["status"]


def test_cordon_is_read_from_any_remaining_object():
    assert gpunode.decode_cordon(b"{}") == gpunode.NO_CORDON
    cordon = gpunode.decode_cordon(b'{"cordonedDevices": ["GPU-1", "GPU-1"], "of a later version": 1}')
    assert cordon == gpunode.Cordon(devices=("GPU-1",))
    assert [cordon.covers(uuid) for uuid in ("GPU-0", "GPU-1")] == [False, True]
    assert gpunode.decode_cordon(b'{"cordoned": true}').covers("GPU-0")


@pytest.mark.parametrize("spec", [b'{"cordoned": 1}', b'{"cordonedDevices": "GPU-1"}', b'{"cordonedDevices": ["all of them"]}', b"{"])
def test_a_cordon_that_cannot_be_understood_is_no_empty_one(spec):
    with pytest.raises(ContractError):
        gpunode.decode_cordon(spec)


def test_object_without_status_is_node_without_agent_report():
    data = {"apiVersion": gpunode.API_VERSION, "kind": "GpuNode", "metadata": {"name": "node-1"}, "spec": {"cordoned": True}}
    assert decode_gpu_node(json.dumps(data).encode()) == GpuNode("node-1", cordoned=True)


def test_a_backend_that_this_version_does_not_know_is_ignored():
    data = json.loads(encode_gpu_node(make_node(isolation=(Isolation.SHIM,))))
    data["status"]["isolation"].append("quantum")
    assert decode_gpu_node(json.dumps(data).encode()).isolation == (Isolation.SHIM,)


def test_an_unknown_version_is_refused_by_name():
    data = encode_gpu_node(make_node()).replace(b"v1alpha1", b"v9")
    with pytest.raises(ContractError, match=r"v9.*upgrade the older"):
        decode_gpu_node(data)


def test_the_summary_counts_models_and_trouble():
    node = make_node()
    node = replace(node, devices=(node.devices[0], replace(node.devices[1], trouble="XID 79")))
    assert json.loads(encode_gpu_node(node))["status"]["summary"] == "2 x NVIDIA H200, 1 unhealthy"


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(make_node(name="Node 1"), id="name"),
        pytest.param(make_node(shares_per_gpu=0), id="no shares"),
        pytest.param(make_node(memory_oversubscription=0.5), id="less than its memory"),
        pytest.param(make_node(memory_oversubscription=float("nan")), id="an oversubscription that is no number"),
        pytest.param(make_node(cordoned_devices=("GPU-0", "GPU-0")), id="cordoned twice"),
        pytest.param(make_node(idle=(IdlePod("u", 1, 2), IdlePod("u", 1, 3))), id="idle twice"),
        pytest.param(make_node(idle=(IdlePod("u", 2, 1),)), id="idle no longer"),
        pytest.param(make_node(idle=(IdlePod("u" * 257, 1, 2),)), id="idle pod with a long UID"),
        pytest.param(make_node(devices=(GpuDevice(make_device()), GpuDevice(make_device()))), id="one UUID twice"),
        pytest.param(make_node(links=(Link("GPU-1", "GPU-0", LinkKind.SYSTEM),)), id="link out of order"),
        pytest.param(make_node(links=(Link("GPU-0", "GPU-9", LinkKind.SYSTEM),)), id="link to elsewhere"),
        pytest.param(make_node(links=(Link("GPU-0", "GPU-1", LinkKind.SYSTEM, 4),)), id="lanes without NVLink"),
        pytest.param(make_node(links=(Link("GPU-0", "GPU-1", LinkKind.SYSTEM, 0, LinkKind.SYSTEM),)), id="a PCIe path twice"),
        pytest.param(make_node(links=(Link("GPU-0", "GPU-1", LinkKind.NVLINK, 1, LinkKind.NVLINK),)), id="NVLink as a PCIe path"),
        pytest.param(make_node(driver_version="x" * 300), id="long text"),
        pytest.param(make_node(utilization=(PodUtilization("u", Utilization(101, 0)),)), id="more than a whole GPU"),
        pytest.param(make_node(utilization=(PodUtilization("u", Utilization()),) * (gpunode.MAX_UTILIZATIONS + 1)), id="too many pods"),
        pytest.param(make_node(devices=(GpuDevice(replace(make_device(), memory_bytes=5)),)), id="not whole MiB"),
    ],
)
def test_what_no_node_can_be_is_not_written(node):
    with pytest.raises(AliquotError):
        encode_gpu_node(node)


@pytest.mark.parametrize(
    "rows",
    [["X NV1"], ["X NV1", "NV2 X"], ["X FOO", "FOO X"], ["X", "X"], ["X NV1", "NV1 X", "X X"], ["X" * 9999, "X"]],
)
def test_a_link_table_of_the_wrong_form_is_refused(rows):
    data = json.loads(encode_gpu_node(make_node()))
    data["status"]["links"] = rows
    with pytest.raises(ContractError):
        decode_gpu_node(json.dumps(data).encode())


@pytest.mark.parametrize(
    ("links", "pcie"),
    [
        pytest.param(["X NV1", "NV1 X"], ["X NV1", "NV1 X"], id="not a PCIe path"),
        pytest.param(["X NV1", "NV1 X"], ["X PIX"], id="too few rows"),
        pytest.param(["X SYS", "SYS X"], ["X PIX", "PIX X"], id="the tables disagree"),
        pytest.param(["X -", "- X"], ["X SYS", "SYS X"], id="a path without a link"),
    ],
)
def test_a_table_of_pcie_paths_that_cannot_be_is_refused(links, pcie):
    data = json.loads(encode_gpu_node(make_node()))
    data["status"] |= {"links": links, "pcie": pcie}
    with pytest.raises(ContractError):
        decode_gpu_node(json.dumps(data).encode())


def test_links_are_brought_into_order():
    devices = [make_device(0), make_device(1), make_device(2)]
    links = [Link("GPU-2", "GPU-1", LinkKind.SYSTEM), Link("GPU-1", "GPU-0", LinkKind.NVLINK, 2)]
    assert gpunode.in_order(devices, links) == (Link("GPU-0", "GPU-1", LinkKind.NVLINK, 2), Link("GPU-1", "GPU-2", LinkKind.SYSTEM))


# --- the manifest -------------------------------------------------------------------------------------------------


def crd() -> dict:
    return yaml.safe_load(CRD.read_text())


def test_the_manifest_names_what_the_contract_names():
    spec = crd()["spec"]
    assert (spec["group"], spec["names"]["plural"], spec["names"]["kind"], spec["scope"]) == (
        contract.GPU_NODE_GROUP,
        contract.GPU_NODE_PLURAL,
        contract.GPU_NODE_KIND,
        "Cluster",
    )
    (version,) = spec["versions"]
    assert version["name"] == contract.GPU_NODE_VERSION
    assert version["subresources"] == {"status": {}}


def test_the_manifest_has_exactly_the_fields_of_the_codec():
    (_,), components = msgspec.json.schema_components([gpunode._GpuNodeV1], ref_template="{name}")
    properties = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    device = properties["status"]["properties"]["devices"]["items"]
    for ours, theirs in [
        ("_SpecV1", properties["spec"]),
        ("_StatusV1", properties["status"]),
        ("_DeviceV1", device),
        ("_InstanceV1", device["properties"]["migInstances"]["items"]),
        ("_IdleV1", properties["status"]["properties"]["idle"]["items"]),
    ]:
        assert set(components[ours]["properties"]) == set(theirs["properties"]), ours
        assert set(components[ours].get("required", ())) == set(theirs.get("required", ())), ours


@pytest.mark.parametrize("uuid", ["GPU-5e1c0f2a-0000-4000-8000-000000000000", "all", "GPU-", "gpu-1", "GPU-1 ", "GPU-" + "a" * 65])
def test_the_manifest_lets_through_only_cordons_that_can_be_read(uuid):
    cordoned = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["cordonedDevices"]
    assert cordoned["x-kubernetes-list-type"] == "set"
    if re.search(cordoned["items"]["pattern"], uuid) is None:
        with pytest.raises(ContractError):
            gpunode.decode_cordon(json.dumps({"cordonedDevices": [uuid]}).encode())
    else:
        assert gpunode.decode_cordon(json.dumps({"cordonedDevices": [uuid]}).encode()).covers(uuid)
