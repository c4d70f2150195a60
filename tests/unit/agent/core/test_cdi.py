# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest

from agent.core.cdi import (
    SHIM_LIBRARIES,
    CapabilityNode,
    HostSpec,
    HostSpecError,
    InjectedDevice,
    Interposition,
    ShimFiles,
    container_spec,
    file_name,
    grant_id_of_file,
    is_host_spec,
    merge_edits,
    parse_host_spec,
)
from aliquot_lab.standin.cdi import load_registry, resolve

LIB = "/usr/lib/x86_64-linux-gnu"
COMPAT_HOOK = {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "enable-cuda-compat"]}
CACHE_HOOK = {
    "hookName": "createContainer",
    "path": "/usr/bin/nvidia-cdi-hook",
    "args": ["nvidia-cdi-hook", "update-ldcache", "--folder", LIB],
}


def mount(path: str) -> dict:
    return {"hostPath": f"/host{path}", "containerPath": path, "options": ["ro"]}


def host_document(**extra) -> dict:
    document = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {
                "name": f"GPU-{minor}",
                "containerEdits": {
                    "deviceNodes": [{"path": f"/dev/nvidia{minor}"}, {"path": f"/dev/dri/card{minor}"}],
                    "env": [f"D{minor}=1"],
                },
            }
            for minor in range(3)
        ],
        "containerEdits": {
            "env": ["COMMON=1"],
            "deviceNodes": [{"path": "/dev/nvidiactl"}],
            "mounts": [
                mount(f"{LIB}/libcuda.so.580.1"),
                mount(f"{LIB}/libnvidia-ml.so.580.1"),
                mount(f"{LIB}/libnvidia-ptxjitcompiler.so.580.1"),
            ],
            "hooks": [CACHE_HOOK, COMPAT_HOOK],
        },
    }
    return {**document, **extra}


def host_of_instance(*paths: str) -> HostSpec:
    """A host spec that knows one MIG instance, with these device nodes."""
    entry = {"name": "MIG-7", "containerEdits": {"deviceNodes": [{"path": path} for path in paths]}}
    return parse_host_spec(host_document(devices=[entry]), "x")


HOST = parse_host_spec(host_document(), "/etc/cdi/nvidia.yaml")
COPIES = {name: f"/state/shim/abc/{name}" for name in SHIM_LIBRARIES}
SHIM = ShimFiles(COPIES, "/run/aliquot/containers/x/limits", "/run/aliquot/containers/x/region", Interposition.FRONT)
PRELOAD = ShimFiles(COPIES, "/run/containers/1/limits", "/run/containers/1/region", Interposition.PRELOAD)


def edits_of(*args, **kwargs) -> dict:
    spec = container_spec(["abc"], *args, **kwargs)
    (device,) = spec["devices"]
    assert device["name"] == "abc"
    return device["containerEdits"]


def mounts_of(edits: dict) -> dict[str, str]:
    return {entry["containerPath"]: entry["hostPath"] for entry in edits["mounts"]}


class TestFront:
    EDITS = edits_of([InjectedDevice("GPU-2", 2), InjectedDevice("GPU-0", 0)], HOST, SHIM)

    def test_the_front_takes_the_place_of_the_drivers_libraries(self):
        mounts = mounts_of(self.EDITS)
        assert mounts[f"{LIB}/libcuda.so.580.1"] == "/state/shim/abc/libcuda.so.1"
        assert mounts[f"{LIB}/libnvidia-ml.so.580.1"] == "/state/shim/abc/libnvidia-ml.so.1"

    def test_the_real_libraries_are_found_under_the_private_names(self):
        mounts = mounts_of(self.EDITS)
        assert mounts["/run/aliquot/driver/libcuda.aliquot-driver.so.1"] == f"/host{LIB}/libcuda.so.580.1"
        assert mounts["/run/aliquot/driver/libnvidia-ml.aliquot-driver.so.1"] == f"/host{LIB}/libnvidia-ml.so.580.1"

    def test_other_libraries_stay_where_they_are(self):
        path = f"{LIB}/libnvidia-ptxjitcompiler.so.580.1"
        assert mounts_of(self.EDITS)[path] == f"/host{path}"

    def test_limits_are_read_only_and_the_region_is_writable(self):
        options = {entry["containerPath"]: entry["options"] for entry in self.EDITS["mounts"]}
        assert "ro" in options["/run/aliquot/limits"]
        assert "rw" in options["/run/aliquot/region"]
        assert "noexec" in options["/run/aliquot/region"]

    def test_only_the_granted_devices_are_there(self):
        assert [node["path"] for node in self.EDITS["deviceNodes"]] == [
            "/dev/nvidiactl", "/dev/nvidia2", "/dev/dri/card2", "/dev/nvidia0", "/dev/dri/card0",
        ]  # fmt: skip
        assert [entry for entry in self.EDITS["env"] if entry.startswith("D")] == ["D2=1", "D0=1"]

    def test_nvidia_runtime_in_the_chain_adds_no_devices(self):
        assert "NVIDIA_VISIBLE_DEVICES=void" in self.EDITS["env"]

    def test_the_hook_that_would_prefer_the_images_libcuda_is_left_out(self):
        assert self.EDITS["hooks"] == [CACHE_HOOK]

    def test_the_spec_has_the_newest_version_its_parts_need(self):
        assert container_spec(["abc"], [InjectedDevice("GPU-0", 0)], HOST, SHIM)["cdiVersion"] == "0.6.0"
        newer = parse_host_spec(host_document(cdiVersion="1.1.0"), "x")
        assert container_spec(["abc"], [InjectedDevice("GPU-0", 0)], newer, SHIM)["cdiVersion"] == "1.1.0"

    def test_a_soname_and_a_versioned_mount_are_one_library(self):
        document = host_document()
        document["containerEdits"]["mounts"].insert(0, mount(f"{LIB}/libcuda.so.1"))
        mounts = mounts_of(edits_of([InjectedDevice("GPU-0", 0)], parse_host_spec(document, "x"), SHIM))
        assert mounts[f"{LIB}/libcuda.so.1"] == mounts[f"{LIB}/libcuda.so.580.1"] == "/state/shim/abc/libcuda.so.1"
        assert mounts["/run/aliquot/driver/libcuda.aliquot-driver.so.1"] == f"/host{LIB}/libcuda.so.1"

    def test_host_spec_without_libcuda_is_refused_as_limit_would_not_hold(self):
        bare = parse_host_spec(host_document(containerEdits={}), "/etc/cdi/nvidia.yaml")
        assert not bare.has_driver
        with pytest.raises(HostSpecError, match=r"/etc/cdi/nvidia.yaml mounts no libcuda"):
            edits_of([InjectedDevice("GPU-0", 0)], bare, SHIM)


class TestPreload:
    def test_the_loaders_list_names_the_preload_library(self):
        mounts = mounts_of(edits_of([InjectedDevice("GPU-0", 0)], HOST, PRELOAD))
        assert mounts["/etc/ld.so.preload"] == "/run/containers/1/ld.so.preload"
        assert mounts["/run/aliquot/libaliquot-preload.so"] == "/state/shim/abc/libaliquot-preload.so"
        assert mounts[f"{LIB}/libcuda.so.580.1"] == f"/host{LIB}/libcuda.so.580.1"

    def test_without_host_spec_device_nodes_are_listed_and_runtime_brings_driver(self):
        present = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"]
        edits = edits_of([InjectedDevice("GPU-1", 1)], None, PRELOAD, present)
        assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"]
        assert "NVIDIA_VISIBLE_DEVICES=GPU-1" in edits["env"]
        assert mounts_of(edits)["/var/run/nvidia-container-devices/GPU-1"] == "/dev/null"


class TestMig:
    def test_an_instance_is_injected_without_the_shim(self):
        document = host_document()
        document["devices"].append({"name": "MIG-7", "containerEdits": {"env": ["M=1"]}})
        edits = edits_of([InjectedDevice("MIG-7", 0)], parse_host_spec(document, "x"), None)
        assert "M=1" in edits["env"]
        assert "/run/aliquot/limits" not in mounts_of(edits)

    def test_without_a_host_spec_its_capability_nodes_are_listed(self):
        edits = edits_of([InjectedDevice("MIG-7", 3, (CapabilityNode(21),))], None, None, ["/dev/nvidiactl"])
        assert edits["deviceNodes"] == [{"path": "/dev/nvidia3"}, {"path": "/dev/nvidia-caps/nvidia-cap21"}, {"path": "/dev/nvidiactl"}]

    CAPABILITIES = (CapabilityNode(66, 237, 0o444), CapabilityNode(67, 237, 0o444))
    NUMBERED = (
        {"path": "/dev/nvidia-caps/nvidia-cap66", "type": "c", "major": 237, "minor": 66, "fileMode": 292},
        {"path": "/dev/nvidia-caps/nvidia-cap67", "type": "c", "major": 237, "minor": 67, "fileMode": 292},
    )

    def test_instance_newer_than_spec_needs_no_host_device_node(self):
        edits = edits_of([InjectedDevice("MIG-7", 0, self.CAPABILITIES)], HOST, None)
        assert edits["deviceNodes"] == [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia0"}, *self.NUMBERED]

    def test_instance_nodes_omitted_by_nvidia_ctk_are_added(self):
        host = host_of_instance("/dev/nvidia0", "/dev/dri/card0")
        assert host.lacks_capabilities("MIG-7")
        edits = edits_of([InjectedDevice("MIG-7", 0, self.CAPABILITIES)], host, None)
        assert [node for node in edits["deviceNodes"] if "caps" in node["path"]] == list(self.NUMBERED)
        assert {"path": "/dev/dri/card0"} in edits["deviceNodes"]

    @pytest.mark.parametrize(
        "paths",
        [
            pytest.param(["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap67"], id="both are there"),
            pytest.param([], id="no GPU's node either, as on simulated nodes"),
        ],
    )
    def test_complete_description_of_instance_is_used_unchanged(self, paths):
        assert not host_of_instance(*paths).lacks_capabilities("MIG-7")

    def test_instance_unknown_to_host_spec_is_never_replaced_by_whole_gpu(self):
        with pytest.raises(HostSpecError, match="no device MIG-7"):
            edits_of([InjectedDevice("MIG-7", 0)], HOST, None)


class TestHostSpec:
    def test_spec_naming_devices_by_index_is_matched_by_device_node(self):
        document = host_document()
        document["devices"][1]["name"] = "1"
        edits = edits_of([InjectedDevice("GPU-1", 1)], parse_host_spec(document, "x"), SHIM)
        assert "D1=1" in edits["env"]

    def test_device_named_all_is_never_treated_as_one_gpu(self):
        everything = {"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}, {"path": "/dev/nvidia1"}]}}
        with pytest.raises(HostSpecError, match="has no device GPU-0"):
            edits_of([InjectedDevice("GPU-0", 0)], parse_host_spec(host_document(devices=[everything]), "x"), SHIM)

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"cdiVersion": None}, "want cdiVersion"),
            ({"devices": [{"containerEdits": {}}]}, "needs a name"),
            ({"containerEdits": []}, "want containerEdits to be an object"),
            ({"containerEdits": {"mounts": "x"}}, "mounts to be a list"),
            ({"devices": 7}, "want devices to be a list, found int"),
            ({"containerEdits": {"env": [None]}}, "env to be texts, found None"),
            ({"containerEdits": {"mounts": [{"hostPath": "/a"}]}}, "mounts to be objects with hostPath and containerPath"),
            ({"containerEdits": {"deviceNodes": ["/dev/nvidia0"]}}, "deviceNodes to be objects with path"),
            ({"containerEdits": {"hooks": [{"path": "/x", "args": 3}]}}, "hooks to be objects with path"),
        ],
    )
    def test_a_malformed_spec_is_refused_by_name(self, change, sentence):
        with pytest.raises(HostSpecError, match=sentence):
            parse_host_spec(host_document(**change), "/etc/cdi/nvidia.yaml")

    def test_only_nvidias_kinds_for_gpus_are_taken(self):
        for kind in ("nvidia.com/gpu", "k8s.device-plugin.nvidia.com/gpu", "management.nvidia.com/gpu"):
            assert is_host_spec({"kind": kind})
        assert not is_host_spec({"kind": "nvidia.com/mofed"})
        assert not is_host_spec(["kind"])


class TestGpuOperator:
    """Its container toolkit writes one device with all nodes, for the Operator's own pods; the driver may be in a container of its own."""

    ROOT = "/run/nvidia/driver"
    LISTED = (
        "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2", "/dev/nvidia-modeset",
        "/dev/nvidia-uvm-tools", "/dev/nvidia-uvm", "/dev/nvidiactl", "/dev/nvidia-caps-imex-channels/channel0",
    )  # fmt: skip

    def host(self, root: str = ROOT, **extra):
        nodes = [{"path": path, "hostPath": f"{root}{path}"} if root else {"path": path} for path in self.LISTED]
        devices = [{"name": "all", "containerEdits": {"deviceNodes": nodes}}]
        edits = {**host_document()["containerEdits"], "deviceNodes": [], "env": ["NVIDIA_VISIBLE_DEVICES=void"]}
        document = host_document(kind="management.nvidia.com/gpu", devices=devices, containerEdits=edits)
        return parse_host_spec({**document, **extra}, "/var/run/cdi/management.nvidia.com-gpu.yaml")

    def test_a_container_gets_its_own_gpu_and_the_nodes_for_control(self):
        edits = edits_of([InjectedDevice("GPU-1", 1)], self.host(), SHIM)
        assert {node["path"]: node["hostPath"] for node in edits["deviceNodes"]} == {
            path: f"{self.ROOT}{path}" for path in ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset",
                                                    "/dev/nvidia1")
        }  # fmt: skip

    def test_it_gets_the_driver_with_the_front_before_it_and_the_hooks(self):
        edits = edits_of([InjectedDevice("GPU-1", 1)], self.host(), SHIM)
        mounts = mounts_of(edits)
        assert mounts[f"{LIB}/libcuda.so.580.1"] == "/state/shim/abc/libcuda.so.1"
        assert mounts["/run/aliquot/driver/libcuda.aliquot-driver.so.1"] == f"/host{LIB}/libcuda.so.580.1"
        assert edits["hooks"] == [CACHE_HOOK]
        assert edits["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]

    @pytest.mark.parametrize("root", ["", ROOT])
    def test_new_mig_instance_gets_its_capabilities_from_folder_of_gpu(self, root):
        young = "/dev/nvidia-caps/nvidia-cap21"
        edits = edits_of([InjectedDevice("MIG-7", 0, (CapabilityNode(21),))], self.host(root), None)
        found = {node["path"]: node.get("hostPath", node["path"]) for node in edits["deviceNodes"]}
        assert (found["/dev/nvidia0"], found[young]) == (f"{root}/dev/nvidia0", f"{root}{young}")
        assert "/dev/nvidia-caps/nvidia-cap1" not in found

    def test_unlisted_gpu_is_refused_with_what_to_do(self):
        with pytest.raises(HostSpecError, match=r"no device GPU-2 \(/dev/nvidia2\).*container-toolkit pod"):
            edits_of([InjectedDevice("GPU-2", 2)], self.host(), SHIM)

    def test_an_instance_without_capabilities_is_never_replaced_by_its_whole_gpu(self):
        with pytest.raises(HostSpecError, match="no device MIG-7"):
            edits_of([InjectedDevice("MIG-7", 0)], self.host(), None)

    def test_a_spec_without_its_one_device_is_refused_by_name(self):
        with pytest.raises(HostSpecError, match="want a device all, found none"):
            self.host(devices=[])


class TestMerge:
    def test_the_later_part_wins_and_order_is_kept(self):
        merged = merge_edits([{"env": ["A=1", "B=1"]}, {"env": ["A=2"]}])
        assert merged["env"] == ["A=2", "B=1"]

    def test_unknown_fields_are_kept(self):
        merged = merge_edits([{"additionalGids": [44]}, {"additionalGids": [44, 45], "intelRdt": {"closID": "x"}}])
        assert merged["additionalGids"] == [44, 45]
        assert merged["intelRdt"] == {"closID": "x"}


def test_own_spec_files_are_distinguished_from_others():
    assert grant_id_of_file(file_name("abc")) == "abc"
    assert grant_id_of_file("nvidia.json") is None
    assert grant_id_of_file(file_name("abc") + ".tmp") is None


def test_document_with_several_names_gives_whole_grant_once_by_any_of_them(tmp_path):
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(container_spec(["abc", "abc.1"], [InjectedDevice("GPU-0", 0)], HOST, SHIM)))
    (tmp_path / "one.json").write_bytes(msgspec.json.encode(container_spec(["one"], [InjectedDevice("GPU-0", 0)], HOST, SHIM)))
    registry = load_registry([tmp_path])
    assert registry.errors == {}
    alone = resolve(registry, ["aliquot.dev/vgpu=one"])
    for names in (["abc"], ["abc.1"], ["abc", "abc.1"]):
        found = resolve(registry, [f"aliquot.dev/vgpu={name}" for name in names])
        assert (found.mounts, found.device_nodes, found.hooks, set(found.env)) == (
            alone.mounts,
            alone.device_nodes,
            alone.hooks,
            set(alone.env),
        )
