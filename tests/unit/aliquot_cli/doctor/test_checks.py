# SPDX-License-Identifier: Apache-2.0
import http.server
import json
import threading
import urllib.request
from typing import Any

import pytest

from aliquot_cli.doctor import agent, driver, kubelet, runtime, system
from aliquot_cli.doctor.findings import Severity
from aliquot_cli.doctor.host import Host
from aliquot_cli.doctor.options import DoctorOptions
from tests.unit.aliquot_cli.doctor.roots import CONTAINERD_17, NVIDIA_CDI, PLUGINS, bad, findings, healthy, of

TOOLKIT_FILE = "/etc/nvidia-container-runtime/config.toml"
CONTAINERD_FILE = "/etc/containerd/config.toml"
CRI = 'plugins."io.containerd.grpc.v1.cri".containerd'
PROGRAM = 'BinaryName = "/usr/bin/nvidia-container-runtime"\n'


@pytest.fixture
def root():
    with healthy() as made:
        yield made


@pytest.mark.parametrize("check", [kubelet.check, runtime.check, system.check, agent.check])
def test_healthy_node_has_no_errors(root, check):
    assert bad(findings(root, check)) == []


class TestDriver:
    @pytest.fixture(autouse=True)
    def nvml(self, monkeypatch):
        self.answer: dict[str, Any] = {
            "driver": "580.159.03",
            "gpus": [{"index": 0, "uuid": "GPU-0", "model": "NVIDIA H200", "compute_mode": 0}],
        }
        monkeypatch.setattr(driver, "probe", lambda *_libraries: self.answer)

    def found(self, root):
        return findings(root, driver.check, nvml_library="libnvidia-ml.so.1")

    def test_working_driver_is_reported(self, root):
        found = self.found(root)
        assert bad(found) == []
        assert "1 x NVIDIA H200" in of(found, "driver.nvml").found

    @pytest.mark.parametrize("hook", ["/usr/bin/nvidia-cdi-hook", "/usr/local/nvidia/toolkit/nvidia-cdi-hook"])
    def test_driver_limits_are_possible_with_all_requirements(self, root, hook):
        self.answer |= {"driver": "615.10", "cgroup_limits": True}
        root.write(hook).write("/sys/fs/cgroup/cgroup.controllers")
        finding = of(self.found(root), "driver.limits")
        assert (finding.severity, hook in finding.found) == (Severity.OK, True)

    @pytest.mark.parametrize(
        ("changed", "missing", "words"),
        [
            ({"driver": "580.159.03"}, "", "driver 580 has no memory limits of its own"),
            ({"cgroup_limits": False}, "", "NVML of driver 615.10 has no calls"),
            ({}, "/usr/bin/nvidia-cdi-hook", "there is no /usr/bin/nvidia-cdi-hook and no /usr/local/nvidia/toolkit/nvidia-cdi-hook"),
            ({}, "/sys/fs/cgroup/cgroup.controllers", "control groups v2 are not mounted"),
        ],
    )
    def test_missing_parts_of_driver_limits_are_reported_without_fault(self, root, changed, missing, words):
        self.answer |= {"driver": "615.10", "cgroup_limits": True, **changed}
        root.write("/usr/bin/nvidia-cdi-hook").write("/sys/fs/cgroup/cgroup.controllers")
        if missing:
            root.remove(missing)
        finding = of(self.found(root), "driver.limits")
        assert (finding.severity, words in finding.found) == (Severity.INFO, True)
        assert ";" not in finding.found, "the rest is there"

    def test_a_missing_module_is_an_error_and_nouveau_is_named(self, root):
        root.remove("/proc/driver/nvidia")
        assert "modprobe nvidia" in of(self.found(root), "driver.module").fix
        root.write("/proc/modules", "nouveau 1 0 - Live\n")
        assert "nouveau" in of(self.found(root), "driver.module").found

    def test_missing_device_nodes_are_named(self, root):
        root.remove("/dev/nvidia-uvm")
        assert "/dev/nvidia-uvm missing" in of(self.found(root), "driver.device-nodes").found

    def test_module_and_library_of_different_versions_are_an_error(self, root):
        self.answer["driver"] = "575.1"
        assert of(self.found(root), "driver.versions").severity is Severity.ERROR

    def test_a_compute_mode_for_one_process_is_an_error(self, root):
        self.answer["gpus"][0]["compute_mode"] = 3
        assert "exclusive process" in of(self.found(root), "driver.compute-mode").found

    def test_a_gpu_that_does_not_answer_is_an_error(self, root):
        self.answer["gpus"] = [{"index": 1, "error": "GPU is lost"}]
        assert "GPU 1 does not answer" in of(self.found(root), "driver.gpu").found

    @pytest.mark.parametrize(("key", "severity"), [("remap_pending", Severity.WARNING), ("remap_failed", Severity.ERROR)])
    def test_memory_rows_that_were_not_remapped_count(self, root, key, severity):
        self.answer["gpus"][0][key] = True
        assert of(self.found(root), "driver.memory").severity is severity

    def test_nvml_that_fails_is_an_error_with_its_cure(self, root):
        self.answer = {"error": "Driver Not Loaded", "fix": "modprobe nvidia"}
        assert of(self.found(root), "driver.nvml").fix == "modprobe nvidia"

    @pytest.fixture
    def contained(self, root):
        """The GPU Operator with its driver's container: nodes and libraries are below the container's root only."""
        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            root.remove(f"/dev/{name}").write(f"/run/nvidia/driver/dev/{name}")
        return root

    def test_device_nodes_of_driver_container_are_accepted(self, contained):
        found = self.found(contained)
        assert bad(found) == []
        assert "2 GPUs are in /run/nvidia/driver/dev" in of(found, "driver.device-nodes").found

    def test_device_node_missing_in_driver_container_is_not_cured_on_host(self, contained):
        finding = of(self.found(contained.remove("/run/nvidia/driver/dev/nvidia-uvm")), "driver.device-nodes")
        assert "/run/nvidia/driver/dev/nvidia-uvm missing" in finding.found
        assert "nvidia-modprobe" not in finding.fix

    @pytest.mark.parametrize(
        ("answer", "wanted"),
        [
            pytest.param({"error": "Driver Not Loaded", "fix": "", "reached": False}, Severity.INFO, id="not opened from outside"),
            pytest.param({"driver": "580.159.03", "gpus": []}, Severity.INFO, id="no node of a GPU outside"),
            pytest.param({"error": "Version Mismatch", "fix": "", "reached": True}, Severity.ERROR, id="opened and sick"),
            pytest.param({"error": "it has not answered", "fix": ""}, Severity.ERROR, id="hangs"),
        ],
    )
    def test_nvml_unreachable_outside_driver_container_is_no_error(self, contained, answer, wanted):
        self.answer = answer
        assert of(self.found(contained), "driver.nvml").severity is wanted

    def test_nvml_unreachable_on_host_is_error(self, root):
        self.answer = {"error": "Driver Not Loaded", "fix": "", "reached": False}
        assert of(self.found(root), "driver.nvml").severity is Severity.ERROR

    def test_the_usual_places_are_tried_after_the_loader(self, contained, monkeypatch):
        asked = []

        def noted_probe(*libraries):
            asked.append(libraries)
            return self.answer

        monkeypatch.setattr(driver, "probe", noted_probe)
        inside = "/run/nvidia/driver/usr/lib64/libnvidia-ml.so.1"
        contained.write(inside)
        findings(contained, driver.check)
        monkeypatch.setattr(Host, "is_own", True)
        findings(contained, driver.check)
        assert asked == [(str(contained.at(inside)),), ("libnvidia-ml.so.1", str(contained.at(inside)))]

    @pytest.mark.parametrize("where", ["root", "contained"])
    def test_library_missing_everywhere_is_fault_outside_driver_container(self, request, where):
        finding = of(findings(request.getfixturevalue(where), driver.check), "driver.nvml")
        assert "not in any of the usual directories" in finding.found
        assert finding.severity is (Severity.ERROR if where == "root" else Severity.INFO)


def test_first_library_that_opens_is_queried(tmp_path):
    """The C library opens and is no NVML; without a library that opens, the driver would not have been reached either."""
    answer = driver.probe(str(tmp_path / "none.so"), "libc.so.6")
    assert "cannot open" not in answer["error"]


def test_hanging_or_crashing_nvml_is_reported_without_hang(monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "NVML_SECONDS", 0.01)
    assert "has not answered" in driver.probe("libnvidia-ml.so.1")["error"]
    monkeypatch.undo()
    assert "cannot open" in driver.probe(str(tmp_path / "none.so"))["error"]


class TestKubelet:
    def test_socket_without_listener_is_error(self, root):
        root.remove("/var/lib/kubelet/pod-resources/kubelet.sock").listen("/var/lib/kubelet/pod-resources/kubelet.sock", alive=False)
        assert "no process listens" in of(findings(root, kubelet.check), "kubelet.pod-resources").found

    def test_another_directory_of_the_kubelet_is_found_and_named(self, root):
        root.remove("/var/lib/kubelet/pod-resources")
        root.listen("/var/lib/k0s/kubelet/pod-resources/kubelet.sock")
        finding = of(findings(root, kubelet.check), "kubelet.pod-resources")
        assert "/var/lib/k0s/kubelet" in finding.found
        assert "kubeletDir" in finding.fix

    @pytest.mark.parametrize(
        ("socket", "resource"),
        [
            pytest.param("nvidia-gpu.sock", "nvidia.com/gpu", id="NVIDIA"),
            pytest.param("nvidia-gpu.shared.sock", "nvidia.com/gpu.shared", id="NVIDIA with time-slicing, renamed"),
            pytest.param("nvidia.sock", "nvidia.com/gpu", id="older ones"),
            pytest.param("nvidiaGPU-1700000000.sock", "nvidia.com/gpu", id="GKE"),
        ],
    )
    def test_second_plugin_for_same_gpus_is_error_once_it_has_some(self, root, socket, resource):
        root.listen(f"{PLUGINS}/{socket}")
        for ids, wanted in ([], []), (["GPU-a"], ["plugins.whole-gpus"]):
            root.write(f"{PLUGINS}/{kubelet.CHECKPOINT}", json.dumps({"Data": {"RegisteredDevices": {resource: ids}}}))
            assert bad(findings(root, kubelet.check)) == wanted

    def test_cure_for_second_plugin_of_same_gpus_exists_per_platform(self, root):
        root.listen(f"{PLUGINS}/nvidia-gpu.sock")
        root.write(f"{PLUGINS}/{kubelet.CHECKPOINT}", json.dumps({"Data": {"RegisteredDevices": {"nvidia.com/gpu": ["GPU-a"]}}}))
        fix = of(findings(root, kubelet.check), "plugins.whole-gpus").fix
        for part in ("nvidia.com/gpu.deploy.device-plugin=false", "gke-no-default-nvidia-gpu-device-plugin=true", "DaemonSet"):
            assert part in fix

    def test_nvidia_plugin_for_other_devices_is_accepted(self, root):
        root.listen(f"{PLUGINS}/nvidia-mig-1g.10gb.sock")
        root.write(f"{PLUGINS}/{kubelet.CHECKPOINT}", json.dumps({"Data": {"RegisteredDevices": {"nvidia.com/gpu": ["GPU-a"]}}}))
        assert bad(findings(root, kubelet.check)) == []

    def test_a_plugin_for_our_resource_is_an_error(self, root):
        root.listen(f"{PLUGINS}/other-vgpu.sock")
        assert bad(findings(root, kubelet.check)) == ["plugins.conflict"]

    def test_two_agents_are_an_error(self, root):
        root.listen(f"{PLUGINS}/aliquot-vgpu-1a-0.sock").listen(f"{PLUGINS}/aliquot-vgpu-2b-0.sock")
        assert "plugins.twice" in bad(findings(root, kubelet.check))

    def test_a_preload_on_the_node_itself_is_a_warning(self, root):
        root.write("/etc/ld.so.preload", "/usr/local/vgpu/libvgpu.so\n")
        assert bad(findings(root, kubelet.check)) == ["plugins.preload"]

    @pytest.mark.parametrize("text", ["{", "[]", '{"Data": null}', '{"Data": {"RegisteredDevices": 3}}'])
    def test_checkpoint_of_other_format_counts_as_missing(self, root, text):
        root.write(f"{PLUGINS}/{kubelet.CHECKPOINT}", text)
        assert bad(findings(root, kubelet.check)) == []


class TestRuntime:
    def test_runtime_is_queried_for_name_and_version(self, root):
        assert "containerd v2.1.4" in of(findings(root, runtime.check), "runtime.socket").found

    def test_no_runtime_is_an_error(self, root):
        root.remove("/run/containerd")
        assert "runtime.socket" in bad(findings(root, runtime.check))

    def test_containerd_2_has_cdi_unless_it_is_turned_off(self, root):
        root.write(CONTAINERD_FILE, 'version = 3\n[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = false\n')
        assert "enable_cdi" in of(findings(root, runtime.check), "runtime.cdi").fix

    @pytest.mark.parametrize(
        ("version", "config", "works"),
        [
            ("v1.7.27", "version = 2\n", False),
            ("v1.7.27", CONTAINERD_17, True),
            ("v1.6.9", CONTAINERD_17, False),
            ("v2.0.0", "version = 2\n", True),
        ],
    )
    def test_cdi_follows_from_version_and_configuration(self, root, version, config, works):
        root.remove("/run/containerd")
        root.containerd(version).write(CONTAINERD_FILE, config)
        assert ("runtime.cdi" in bad(findings(root, runtime.check))) is not works

    def test_imported_files_count(self, root):
        root.write(CONTAINERD_FILE, 'version = 3\nimports = ["conf.d/*.toml"]\n')
        root.write("/etc/containerd/conf.d/99-nvidia.toml", '[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = false\n')
        assert "runtime.cdi" in bad(findings(root, runtime.check))

    def test_the_containerd_of_k3s_is_read_where_k3s_has_it(self, root):
        root.remove("/run/containerd").containerd("v1.7.23", "/run/k3s/containerd/containerd.sock")
        root.write("/var/lib/rancher/k3s/agent/etc/containerd/config.toml", CONTAINERD_17)
        assert bad(findings(root, runtime.check)) == []

    def test_a_spec_of_an_earlier_driver_is_an_error(self, root):
        root.remove("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03")
        finding = of(findings(root, runtime.check), "cdi.nvidia")
        assert "libcuda.so.580.159.03" in finding.found
        assert "nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml" in finding.fix, "another file beside it would not be heard"

    @pytest.mark.parametrize(
        ("config", "wanted"),
        [
            pytest.param("", Severity.ERROR, id="runc is the default"),
            pytest.param('default_runtime_name = "nvidia"', Severity.WARNING, id="NVIDIA's runtime is the default"),
            pytest.param('runtimes.runc.options.BinaryName = "/usr/bin/nvidia-container-runtime"', Severity.WARNING, id="as runc"),
        ],
    )
    def test_missing_nvidia_spec_is_error_unless_runtime_brings_driver(self, root, config, wanted):
        root.remove("/var/run/cdi/nvidia.yaml")
        root.write(CONTAINERD_FILE, f'version = 3\n[plugins."io.containerd.cri.v1.runtime".containerd]\n{config}\n')
        finding = of(findings(root, runtime.check), "cdi.nvidia")
        assert finding.severity is wanted
        assert "--output=/etc/cdi/nvidia.yaml" in finding.fix, "the other directory is empty after a reboot"

    def test_missing_nvidia_spec_is_warning_when_runtime_is_unknown(self, root):
        root.remove("/var/run/cdi/nvidia.yaml").remove("/run/containerd")
        assert of(findings(root, runtime.check), "cdi.nvidia").severity is Severity.WARNING

    @pytest.mark.parametrize(
        ("name", "text", "wanted"),
        [
            pytest.param("/etc/crio/crio.conf", "[crio.runtime]\n", Severity.ERROR, id="crun is the default"),
            pytest.param(
                "/etc/crio/crio.conf.d/99-nvidia.conf", '[crio.runtime]\ndefault_runtime = "nvidia"\n', Severity.WARNING, id="nvidia"
            ),
            pytest.param("/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json", "{}", Severity.WARNING, id="by its hook"),
        ],
    )
    def test_cri_o_is_known_by_its_drop_ins_and_hooks(self, root, name, text, wanted):
        root.remove("/var/run/cdi/nvidia.yaml").remove("/run/containerd").listen("/run/crio/crio.sock").write(name, text)
        found = findings(root, runtime.check)
        assert of(found, "cdi.nvidia").severity is wanted
        assert of(found, "runtime.cdi").severity is Severity.OK

    @pytest.mark.parametrize(("text", "wanted"), [("", Severity.ERROR), ('{"default-runtime": "nvidia"}', Severity.WARNING)])
    def test_docker_is_known_by_its_default_runtime(self, root, text, wanted):
        root.remove("/var/run/cdi/nvidia.yaml").remove("/run/containerd").listen("/run/cri-dockerd.sock")
        root.write("/etc/docker/daemon.json", text)
        assert of(findings(root, runtime.check), "cdi.nvidia").severity is wanted

    def test_the_gpu_operators_spec_serves_and_is_written_by_its_toolkit(self, root):
        root.remove("/var/run/cdi/nvidia.yaml")
        root.write("/var/run/cdi/management.nvidia.com-gpu.yaml", NVIDIA_CDI.replace("nvidia.com/gpu", "management.nvidia.com/gpu"))
        assert of(findings(root, runtime.check), "cdi.nvidia").severity is Severity.OK
        root.remove("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03")
        assert "container-toolkit pod" in of(findings(root, runtime.check), "cdi.nvidia").fix

    @pytest.mark.parametrize(
        ("socket", "name", "text"),
        [
            ("/run/containerd/containerd.sock", CONTAINERD_FILE, "["),
            ("/run/crio/crio.sock", "/etc/crio/crio.conf.d/10.conf", "["),
            ("/run/cri-dockerd.sock", "/etc/docker/daemon.json", "[]"),
        ],
    )
    def test_a_file_that_the_runtime_cannot_read_is_named(self, root, socket, name, text):
        root.remove("/run/containerd").listen(socket).write(name, text)
        assert name in of(findings(root, runtime.check), "runtime.cdi").found

    def test_a_spec_that_cannot_be_read_is_an_error(self, root):
        root.write("/etc/cdi/broken.json", "{")
        assert "broken.json" in of(findings(root, runtime.check), "cdi.spec").found


ENABLED = 'version = 3\n[plugins."io.containerd.cri.v1.runtime"]\nenable_selinux = true\n'
RHEL = "/run /var/run\n/run/lock /var/lock\n"
LATER = "/var/run /run\n"


class TestSelinux:
    """Containers may use what has a label of theirs. /run and /var/run are one tree to the policy, and rules name it by one of them."""

    @pytest.fixture(autouse=True)
    def enforcing(self, root, monkeypatch):
        self.types: dict[str, Any] = {}
        monkeypatch.setattr(Host, "selinux_type", lambda _host, name: self.types.get(name, "var_run_t"))
        root.write("/sys/fs/selinux/enforce", "1").write("/etc/selinux/config", "# which\nSELINUXTYPE=targeted\n")
        root.write(CONTAINERD_FILE, ENABLED)

    def found(self, root):
        return of(findings(root, runtime.check), "system.selinux")

    @pytest.mark.parametrize(("equal", "wanted"), [(RHEL, "/var/run/aliquot"), (LATER, "/run/aliquot"), ("", "/run/aliquot")])
    def test_confining_runtime_gets_cure_with_commands_that_its_policy_accepts(self, root, equal, wanted):
        root.write("/etc/selinux/targeted/contexts/files/file_contexts.subs_dist", equal)
        assert self.found(root).severity is Severity.ERROR
        assert f"semanage fcontext -a -t container_file_t '{wanted}(/.*)?'" in self.found(root).fix
        assert self.found(root).fix.endswith("restorecon -RF /run/aliquot /var/lib/aliquot/shim")

    def test_container_labels_pass_selinux_check(self, root):
        self.types = {"/run/aliquot": "container_file_t", "/var/lib/aliquot/shim": "container_file_t"}
        assert self.found(root).severity is Severity.OK

    def test_runtime_without_selinux_confinement_passes(self, root):
        root.write(CONTAINERD_FILE, "version = 3\n")
        assert self.found(root).severity is Severity.OK

    def test_cri_o_confines_unless_configured_otherwise(self, root):
        root.remove("/run/containerd").listen("/run/crio/crio.sock")
        assert self.found(root).severity is Severity.ERROR
        root.write("/etc/crio/crio.conf", "[crio.runtime]\nselinux = false\n")
        assert self.found(root).severity is Severity.OK

    def test_a_runtime_that_is_not_known_is_a_warning(self, root):
        root.remove("/run/containerd")
        assert self.found(root).severity is Severity.WARNING

    def test_permissive_selinux_gives_no_finding(self, root):
        root.write("/sys/fs/selinux/enforce", "0")
        assert not [finding for finding in findings(root, runtime.check) if finding.check == "system.selinux"]


@pytest.fixture
def rpm(tmp_path, monkeypatch):
    """A program rpm that runs a script."""

    def make(script: str) -> None:
        program = tmp_path / "bin/rpm"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    return make


class TestToolkit:
    @pytest.mark.parametrize("text", ["", "accept-nvidia-visible-devices-envvar-when-unprivileged = true\n"])
    def test_gpus_by_environment_are_a_warning_where_the_runtime_must_be_named(self, root, text):
        root.write(TOOLKIT_FILE, text)
        finding = of(findings(root, runtime.check), "toolkit.envvar")
        assert finding.severity is Severity.WARNING
        assert "= false" in finding.fix

    def test_gpus_by_environment_are_an_error_where_nvidias_runtime_is_the_default(self, root):
        root.write(TOOLKIT_FILE, "")
        root.write(CONTAINERD_FILE, '[plugins."io.containerd.grpc.v1.cri".containerd]\ndefault_runtime_name = "nvidia"\n')
        assert of(findings(root, runtime.check), "toolkit.envvar").severity is Severity.ERROR

    def test_the_cure_names_the_operators_own_settings_where_it_owns_the_file(self, root):
        root.write(runtime.OPERATOR_TOOLKIT_CONFIG, "")
        fix = of(findings(root, runtime.check), "toolkit.envvar").fix
        assert "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED=false" in fix
        assert "ACCEPT_NVIDIA_VISIBLE_DEVICES_AS_VOLUME_MOUNTS=true" in fix

    def test_toolkit_ignoring_variable_and_mount_leaves_agent_without_gpus(self, root):
        root.write(TOOLKIT_FILE, "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n")
        finding = of(findings(root, runtime.check), "toolkit.envvar")
        assert finding.severity is Severity.ERROR
        assert "accept-nvidia-visible-devices-as-volume-mounts = true" in finding.fix

    def test_a_toolkit_with_a_known_hole_is_an_error(self, root):
        root.write(
            "/var/lib/dpkg/status",
            "Package: nvidia-container-toolkit\nStatus: install ok\nVersion: 1.17.7-1\n\nPackage: zlib\nVersion: 1.3\n",
        )
        assert "CVE-2025-23266" in of(findings(root, runtime.check), "toolkit.version").found

    @pytest.mark.parametrize(
        ("answer", "wanted"),
        [
            pytest.param("echo 1.17.7-1", Severity.ERROR, id="with the hole"),
            pytest.param("echo 1.18.1-1", Severity.OK, id="without"),
            pytest.param("echo package $6 is not installed; exit 1", None, id="not installed"),
            pytest.param("echo cannot open database >&2; exit 1", Severity.INFO, id="unreadable"),
        ],
    )
    def test_toolkit_from_rpm_is_looked_up_in_node_database(self, root, rpm, answer, wanted):
        root.remove("/var/lib/dpkg/status").write("/usr/lib/sysimage/rpm/rpmdb.sqlite")
        rpm(f'[ "$2" = {root.base}/usr/lib/sysimage/rpm ] && [ "$6" = nvidia-container-toolkit ] || exit 9\n{answer}')
        found = [one.severity for one in findings(root, runtime.check) if one.check == "toolkit.version"]
        assert found == ([wanted] if wanted else [])

    def test_rpm_database_without_reader_is_reported(self, root, monkeypatch):
        root.remove("/var/lib/dpkg/status").write("/var/lib/rpm/Packages")
        monkeypatch.setenv("PATH", str(root.base))
        finding = of(findings(root, runtime.check), "toolkit.version")
        assert (finding.severity, "rpm -q nvidia-container-toolkit" in finding.fix) == (Severity.INFO, True)

    def test_no_toolkit_is_worth_knowing_only(self, root):
        root.remove(TOOLKIT_FILE)
        finding = of(findings(root, runtime.check), "toolkit.config")
        assert (finding.severity, "pods cannot reach GPUs" in finding.found) == (Severity.INFO, True)

    @pytest.mark.parametrize(
        ("config", "severity"),
        [
            pytest.param(f'[{CRI}]\ndefault_runtime_name = "nvidia"\n', Severity.ERROR, id="the default runtime"),
            pytest.param(f"[{CRI}.runtimes.nvidia.options]\n{PROGRAM}", Severity.WARNING, id="one of several"),
            pytest.param(f"[{CRI}.runtimes.gpu.options]\n{PROGRAM}", Severity.WARNING, id="by another name"),
        ],
    )
    def test_without_file_toolkit_defaults_apply_when_runtime_uses_it(self, root, config, severity):
        root.remove(TOOLKIT_FILE).write(CONTAINERD_FILE, config)
        found = findings(root, runtime.check)
        finding = of(found, "toolkit.envvar")
        assert finding.severity is severity
        assert finding.found.startswith(f"{TOOLKIT_FILE} does not exist")
        assert f"in {TOOLKIT_FILE}: " in finding.fix
        assert "cannot reach" not in " ".join(one.found for one in found)

    def test_runtime_with_unreadable_configuration_is_reported_as_unknown(self, root):
        root.remove(TOOLKIT_FILE).write(CONTAINERD_FILE, "not TOML")
        finding = of(findings(root, runtime.check), "toolkit.config")
        assert (finding.severity, "cannot reach" in finding.found) == (Severity.INFO, False)


DRIFT = b"""{"drifts": [
    {"kind": "damaged-grant", "pod": "a", "message": "its row is damaged"},
    {"kind": "lost-spec", "pod": "b", "message": "its CDI spec is missing"}
]}"""


class Nobody:
    """Reaches no server."""

    def open(self, url: str, timeout: float):
        raise OSError(url)


class TestSystem:
    def test_control_groups_v1_are_a_warning(self, root):
        root.remove("/sys/fs/cgroup/cgroup.controllers").write("/sys/fs/cgroup/memory/tasks")
        assert "v1" in of(findings(root, system.check), "system.cgroups").found

    def test_few_inotify_instances_are_a_warning(self, root):
        root.write("/proc/sys/fs/inotify/max_user_instances", "128\n")
        assert bad(findings(root, system.check)) == ["system.inotify"]

    def test_secret_readable_by_others_is_error(self, root):
        root.write(f"{DoctorOptions().state_dir}/secret", "s", mode=0o640)
        assert bad(findings(root, agent.check)) == ["agent.secret"]

    def test_an_agent_that_does_not_answer_is_a_warning(self, root):
        root.write(f"{DoctorOptions().runtime_dir}/metrics-address", "127.0.0.1:9\n")
        assert bad(findings(root, agent.check)) == ["agent.ready"]

    def test_address_with_wildcard_ending_is_called_unchanged(self, root, monkeypatch):
        root.write(f"{DoctorOptions().runtime_dir}/metrics-address", "10.0.0.0:9402\n")
        monkeypatch.setattr(agent, "_DIRECT", Nobody())
        assert of(findings(root, agent.check), "agent.ready").found == "no agent answers on 10.0.0.0:9402: http://10.0.0.0:9402/readyz"

    @pytest.mark.parametrize(("listening", "written"), [("127.0.0.2", "127.0.0.2"), ("127.0.0.1", "0.0.0.0")])
    def test_agent_is_queried_at_published_address_without_proxy(self, root, monkeypatch, listening, written):
        class Ready(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                if self.path == "/drift":
                    self.wfile.write(DRIFT)

            def log_message(self, *_):
                pass

        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers the environment of its first use
        with http.server.HTTPServer((listening, 0), Ready) as server:
            serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            serving.start()
            root.write(f"{DoctorOptions().runtime_dir}/metrics-address", f"{written}:{server.server_port}\n")
            found = findings(root, agent.check)
            server.shutdown()
            serving.join()
        assert of(found, "agent.ready").severity is Severity.OK
        assert of(found, "agent.ledger").found == "a: its row is damaged"
