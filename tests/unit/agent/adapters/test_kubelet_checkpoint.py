# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from agent.adapters.kubelet_checkpoint import FILE_NAME, KubeletCheckpointFile
from agent.core.identity import RememberedDevices
from agent.core.injection import legacy_answer, named_answer
from agent.services.device_plugin import response_of
from aliquot_lab.standin.devices import Allocation, DeviceTable, PluginDevice, encode_checkpoint

VGPU = "nvidia.com/vgpu"


def test_what_a_kubelet_wrote_is_read(tmp_path):
    advertised = {VGPU: {"a": PluginDevice("a", healthy=True, numa_nodes=(0,)), "b": PluginDevice("b", healthy=True, numa_nodes=(1,))}}
    table = DeviceTable(
        advertised, [Allocation("uid-1", "init", VGPU, ("a", "b"), b"kept"), Allocation("uid-2", "main", "other/x", ("c",), b"")]
    )
    (tmp_path / FILE_NAME).write_bytes(encode_checkpoint(table))
    assert set(KubeletCheckpointFile(tmp_path).remembered()) == {
        RememberedDevices("uid-1", "init", VGPU, frozenset({"a", "b"}), b"kept"),
        RememberedDevices("uid-2", "main", "other/x", frozenset({"c"})),
    }


def test_the_form_of_old_kubelets_is_read(tmp_path):
    entry = {"PodUID": "u", "ContainerName": "c", "ResourceName": VGPU, "DeviceIDs": ["a"], "AllocResp": ""}
    (tmp_path / FILE_NAME).write_text(json.dumps({"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {}}, "Checksum": 1}))
    assert KubeletCheckpointFile(tmp_path).remembered() == (RememberedDevices("u", "c", VGPU, frozenset({"a"})),)


@pytest.mark.parametrize("left_out", [{}, {"AllocResp": None}])
def test_entry_without_reply_still_names_holder_of_ids(tmp_path, left_out):
    entry = {"PodUID": "u", "ContainerName": "c", "ResourceName": VGPU, "DeviceIDs": {"-1": ["a"]}, **left_out}
    (tmp_path / FILE_NAME).write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))
    assert KubeletCheckpointFile(tmp_path).remembered() == (RememberedDevices("u", "c", VGPU, frozenset({"a"})),)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(named_answer("aliquot.dev/grant=g"), id="with CDI"),
        pytest.param(legacy_answer(VGPU, ["GPU-0::1"], {"GPU-0": 0}, ["/dev/nvidiactl"], "/run/g"), id="without"),
    ],
)
def test_what_allocate_answered_is_read_back(tmp_path, answer):
    assert KubeletCheckpointFile(tmp_path).answer(response_of(answer).SerializeToString()) == answer


@pytest.mark.parametrize("kept", [b"", b"\xff\xff", b"\x0a\x05x"])
def test_an_answer_that_cannot_be_read_says_nothing(tmp_path, kept):
    assert KubeletCheckpointFile(tmp_path).answer(kept) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"Data": {"PodDeviceEntries": [{"PodUID": 1}]}}',
        b'{"Data": {"PodDeviceEntries": [{"PodUID": "\xff"}]}}',
        b'{"Data": {"PodDeviceEntries": [{"PodUID": "u", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": [], "AllocResp": "?"}]}}',
        b'{"Data": null}',
        b'{"Data": {"PodDeviceEntries": null}}',
    ],
)
def test_what_is_not_as_expected_says_nothing(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    assert KubeletCheckpointFile(tmp_path).remembered() == ()


def test_a_kubelet_that_never_gave_a_device_has_no_file(tmp_path):
    assert KubeletCheckpointFile(tmp_path).remembered() == ()


def test_reader_can_see_that_checkpoint_was_written(tmp_path):
    checkpoint, path = KubeletCheckpointFile(tmp_path), tmp_path / FILE_NAME
    assert checkpoint.version() is None
    for _ in range(3):  # as kubelet does, also with the same contents
        before = checkpoint.version()
        (tmp_path / "new").write_bytes(encode_checkpoint(DeviceTable()))
        (tmp_path / "new").replace(path)
        assert checkpoint.version() != before
        assert checkpoint.version() == checkpoint.version()
