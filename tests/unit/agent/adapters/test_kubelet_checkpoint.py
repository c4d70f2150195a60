import json

import pytest

from agent.adapters.kubelet_checkpoint import FILE_NAME, KubeletCheckpoint
from agent.core.identity import RememberedDevices
from aliquot.standin.devices import Allocation, DeviceTable, PluginDevice, encode_checkpoint

VGPU = "nvidia.com/vgpu"


def test_what_a_kubelet_wrote_is_read(tmp_path):
    advertised = {VGPU: {"a": PluginDevice("a", healthy=True, numa_nodes=(0,)), "b": PluginDevice("b", healthy=True, numa_nodes=(1,))}}
    table = DeviceTable(
        advertised, [Allocation("uid-1", "init", VGPU, ("a", "b"), b""), Allocation("uid-2", "main", "other/x", ("c",), b"")]
    )
    (tmp_path / FILE_NAME).write_bytes(encode_checkpoint(table))
    assert set(KubeletCheckpoint(tmp_path).remembered()) == {
        RememberedDevices("uid-1", "init", VGPU, frozenset({"a", "b"})),
        RememberedDevices("uid-2", "main", "other/x", frozenset({"c"})),
    }


def test_the_form_of_old_kubelets_is_read(tmp_path):
    entry = {"PodUID": "u", "ContainerName": "c", "ResourceName": VGPU, "DeviceIDs": ["a"], "AllocResp": ""}
    (tmp_path / FILE_NAME).write_text(json.dumps({"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {}}, "Checksum": 1}))
    assert KubeletCheckpoint(tmp_path).remembered() == (RememberedDevices("u", "c", VGPU, frozenset({"a"})),)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"Data": {"PodDeviceEntries": [{"PodUID": 1}]}}',
        b'{"Data": {"PodDeviceEntries": [{"PodUID": "\xff"}]}}',
        b'{"Data": null}',
        b'{"Data": {"PodDeviceEntries": null}}',
    ],
)
def test_what_is_not_as_expected_says_nothing(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    assert KubeletCheckpoint(tmp_path).remembered() == ()


def test_a_kubelet_that_never_gave_a_device_has_no_file(tmp_path):
    assert KubeletCheckpoint(tmp_path).remembered() == ()
