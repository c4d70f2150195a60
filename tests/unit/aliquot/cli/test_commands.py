import importlib
import json
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence

import click
import pytest
from click.testing import CliRunner, Result

from aliquot.__main__ import main
from aliquot.cli import cordon, drift, live, top
from aliquot.cli.completion import candidates, kubectl_complete
from aliquot.cli.errors import AccessError, NotFoundError
from aliquot.cli.output import Cell, Column, Output, document, heat, memory, table
from aliquot.cli.pods import asks_for_gpus, gpu_pods, pod_of
from aliquot.paths import SOURCE_ROOT
from proto import codec, contract
from proto.model import ContainerAssignment, DeviceShare, PodAssignment
from proto.units import MIB
from tests.unit.aliquot.cli.clusters import METRICS, FakeCluster, agent_pod, gpu_node
from tests.unit.aliquot.cli.test_model import PAGE


class TestTop:
    def look(self, *pages: str, kind: str = "slices", output: Output = Output.TABLE, sort: str | None = None) -> list[str]:
        """Look as often as there are pages, the agent's page another one each time."""
        cluster = FakeCluster(gpu_node())
        looks = top.looks(cluster, top.Ask(kind, (), None, "", sort, output), 0.0, len(pages))
        shown = []
        for page in pages:
            cluster.pages[PAGE] = page
            shown.append(next(looks))
        return shown

    def test_the_first_look_shows_seconds_and_the_next_a_rate(self):
        first, second = self.look(METRICS, METRICS.replace("} 4.0", "} 4.1"))
        assert "4.0s" in first
        assert "4.0s" not in second
        assert "%" in second

    def test_a_paused_slice_is_said_to_be(self):
        sample = 'aliquot_container_paused{namespace="default",pod="train",container="main",device_uuid="GPU-aaaa-0"} '
        for value, shown in (("1", True), ("0", False)):
            (page,) = self.look(f"{METRICS}{sample}{value}\n")
            assert ("paused" in click.unstyle(page).splitlines()[1].split()) is shown

    def test_where_nobody_scrapes_the_first_look_is_two(self, monkeypatch):
        monkeypatch.setattr(top.time, "sleep", lambda seconds: waited.append(seconds))
        waited: list[float] = []
        busy = 'aliquot_container_busy_seconds_total{namespace="default",pod="train",container="main",device_uuid="GPU-aaaa-0"} 7\n'
        (page,) = self.look(METRICS + busy)
        assert waited == [top.RATE_SECONDS]
        assert "0%" in page.splitlines()[1]

    def test_what_is_not_enforced_stands_out(self):
        (page,) = self.look(METRICS, output=Output.WIDE)
        assert "NO" in click.unstyle(page).splitlines()[1].split()

    def test_what_is_not_known_is_a_dash_and_comes_last(self):
        (page,) = self.look(METRICS, sort="used")
        assert [line.split()[3] for line in page.splitlines()[1:]] == ["train", "hard"]
        assert "-/-" in page

    def test_scripts_get_the_same_facts(self):
        (page,) = self.look(METRICS, output=Output.JSON)
        (node,) = json.loads(page)["nodes"]
        assert node["gpus"][0]["slices"][0]["limit_bytes"] == 100 * MIB


class TestCordon:
    def change(self, cluster: FakeCluster, name: str, how) -> bool:
        return cordon.apply(cluster, cordon.aim_of(cluster, name), how)

    def test_a_gpu_is_put_into_the_spec_and_taken_out_again(self):
        cluster = FakeCluster(gpu_node())
        assert self.change(cluster, "n1/1", cordon._with)
        assert cluster.objects["n1"]["spec"] == {"cordonedDevices": ["GPU-bbbb-1"]}
        assert not self.change(cluster, "n1/1", cordon._with)
        assert self.change(cluster, "n1/0", cordon._with)
        assert self.change(cluster, "n1/1", cordon._without)
        assert cluster.objects["n1"]["spec"] == {"cordonedDevices": ["GPU-aaaa-0"]}
        assert self.change(cluster, "n1/0", cordon._without)
        assert cluster.objects["n1"]["spec"] == {}

    def test_a_node_is_cordoned_as_a_whole_and_single_gpus_stay_as_they_are(self):
        cluster = FakeCluster(gpu_node(cordoned_devices=("GPU-aaaa-0",)))
        self.change(cluster, "n1", cordon._with)
        assert cluster.objects["n1"]["spec"] == {"cordoned": True, "cordonedDevices": ["GPU-aaaa-0"]}
        self.change(cluster, "n1", cordon._without)
        assert cluster.objects["n1"]["spec"] == {"cordonedDevices": ["GPU-aaaa-0"]}

    def test_a_change_by_somebody_else_is_read_again_and_kept(self):
        cluster = FakeCluster(gpu_node())
        cluster.conflicts = 2
        assert self.change(cluster, "n1/0", cordon._with)
        assert cluster.objects["n1"]["spec"] == {"cordonedDevices": ["GPU-aaaa-0"]}

    def test_a_change_that_never_gets_through_is_given_up(self):
        cluster = FakeCluster(gpu_node())
        cluster.conflicts = 99
        with pytest.raises(AccessError, match="try again"):
            self.change(cluster, "n1/0", cordon._with)

    def test_a_cluster_without_objects_has_nothing_to_cordon(self):
        with pytest.raises(NotFoundError, match="GpuNode"):
            cordon.aim_of(FakeCluster(installed=False), "n1")


class TestPods:
    def pod(self, limits: dict[str, str], **status: object) -> dict[str, object]:
        container = {"name": "main", "resources": {"limits": limits}}
        return {
            "metadata": {"name": "p", "namespace": "d", "uid": "u", "annotations": {}},
            "spec": {"containers": [container]},
            "status": status,
        }

    def test_a_long_list_is_read_page_by_page(self):
        cluster = FakeCluster(pods=[{**self.pod({contract.RESOURCE_VGPU: "1"}), "number": number} for number in range(7)])
        cluster.page_size = 3
        assert len(gpu_pods(cluster)) == 7

    def test_only_pods_with_a_gpu_resource_are_ours(self):
        assert asks_for_gpus(self.pod({contract.RESOURCE_VGPU_MEMORY: "10"}))
        assert not asks_for_gpus(self.pod({"cpu": "1"}))
        assert not asks_for_gpus({"metadata": {}, "spec": {"containers": [{"name": "x"}]}})

    def test_amounts_and_further_resources_are_read(self):
        pod = pod_of(self.pod({contract.RESOURCE_VGPU: "2", contract.RESOURCE_VGPU_MEMORY: "64", "nvidia.com/mig-1g.10gb": "1"}))
        assert (pod.vgpus, pod.memory_bytes, pod.cores_percent) == (2, 64 * MIB, None)
        assert pod.other == {"nvidia.com/mig-1g.10gb": "1"}

    def test_why_it_waits_is_what_the_scheduler_or_the_kubelet_says(self):
        unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes have room"}
        assert pod_of(self.pod({}, phase="Pending", conditions=[unscheduled])).waits_for == "0/3 nodes have room"
        refused = {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "aliquot: no room"}}}
        assert pod_of(self.pod({}, phase="Pending", containerStatuses=[refused])).waits_for == "aliquot: no room"
        assert pod_of(self.pod({}, phase="Running", conditions=[unscheduled])).waits_for == ""

    def test_the_assignment_names_its_devices_unless_it_is_anothers(self):
        pod = self.pod({})
        text = codec.encode_assignment(PodAssignment("u", (ContainerAssignment("main", (DeviceShare("GPU-aaaa-0", 10 * MIB, None),)),)))
        pod["metadata"]["annotations"][contract.ANNOTATION_ASSIGNMENT] = text  # type: ignore[index]
        assert pod_of(pod).assigned == ("GPU-aaaa-0",)
        pod["metadata"]["uid"] = "another"  # type: ignore[index]
        assert pod_of(pod).assigned == ()


class TestDrift:
    PAGE = json.dumps(
        {
            "node": "n1",
            "drifts": [
                {"kind": "orphan-spec", "cure": "sweep", "seconds": 3.2, "namespace": "", "pod": "", "message": "a spec of no grant"}
            ],
            "findings": [{"kind": "over-limit", "seconds": 1, "namespace": "d", "pod": "p", "container": "c", "message": "too much"}],
        }
    )

    QUIET = json.dumps({"node": "n1", "drifts": [], "findings": []})

    def look(self, monkeypatch, *arguments: str, nodes: Sequence[str] = (), agents_on: Sequence[str] = (), **facts: bool) -> Result:
        """Ask a cluster whose agents all answer that nothing differs."""
        cluster = FakeCluster(*(gpu_node(name) for name in nodes), pods=[agent_pod(name) for name in agents_on], **facts)
        cluster.pages = {PAGE.replace("n1", name).replace("/metrics", "/drift"): self.QUIET for name in agents_on}
        monkeypatch.setattr(drift, "connect", lambda target: cluster)
        return CliRunner().invoke(main, ["drift", *arguments])

    @pytest.mark.parametrize("installed", [True, False])
    def test_a_cluster_without_agents_and_inventories_is_not_healthy(self, monkeypatch, installed):
        result = self.look(monkeypatch, installed=installed)
        assert result.exit_code == 1
        assert "expected nodes with GPUs: found neither a gpunode nor a pod with label" in result.output

    def test_a_node_with_an_inventory_and_no_agent_is_silent(self, monkeypatch):
        result = self.look(monkeypatch, nodes=["n1", "n2"], agents_on=["n1"])
        assert (result.exit_code, result.stdout, result.stderr) == (1, "nothing differs on 1 nodes\n", "n2: no agent runs there\n")
        document = json.loads(self.look(monkeypatch, "-o", "json", nodes=["n1", "n2"], agents_on=["n1"]).stdout)
        assert document == {"differences": [], "silent": {"n2": "no agent runs there"}}

    def test_only_the_nodes_that_are_named_count(self, monkeypatch):
        nodes, agents_on = ["n1", "n2"], ["n1", "n3"]
        assert self.look(monkeypatch, "--node", "n1", nodes=nodes, agents_on=agents_on).exit_code == 0
        assert self.look(monkeypatch, "--node", "n2", nodes=nodes, agents_on=agents_on).exit_code == 1
        assert self.look(monkeypatch, "--node", "n3", nodes=nodes, agents_on=agents_on).exit_code == 0, "it has no inventory yet"
        unknown = self.look(monkeypatch, "--node", "n9", nodes=nodes, agents_on=agents_on)
        assert (unknown.exit_code, "no node with GPUs is named n9; there are n1, n2, n3" in unknown.output) == (3, True)

    def test_drifts_and_findings_are_read(self):
        first, second = drift.differences("n1", self.PAGE)
        assert (first.source, first.kind, first.cure, first.seconds) == ("drift", "orphan-spec", "sweep", 3.2)
        assert (second.source, second.pod, second.cure) == ("audit", "p", "")

    @pytest.mark.parametrize("page", ["", "[]", "{}", '{"drifts": [{}], "findings": []}'])
    def test_a_page_of_another_form_is_an_error(self, page):
        with pytest.raises(AccessError, match="n1"):
            drift.differences("n1", page)


class TestOutput:
    def test_columns_are_aligned_and_nothing_trails(self):
        columns = (Column("NAME", lambda row: row), Column("LENGTH", lambda row: str(len(row))), Column("X", str, wide=True))
        assert table(columns, ["a", "long-name"], Output.TABLE) == ["NAME        LENGTH", "a           1", "long-name   9"]
        assert table(columns, ["a"], Output.WIDE)[0].endswith("X")

    def test_colour_does_not_move_columns(self):
        columns = (Column("N", lambda row: Cell(row, "red")), Column("M", lambda _: "m"))
        lines = table(columns, ["a", "bbb"], Output.TABLE)
        assert [click.unstyle(line) for line in lines] == ["N     M", "a     m", "bbb   m"]
        assert "\x1b" in lines[1]

    def test_amounts_are_short(self):
        assert [memory(value) for value in (None, 0, 512 * MIB, 1536 * MIB)] == ["-", "0Mi", "512Mi", "1.5Gi"]
        assert [heat(ratio, "x").colour for ratio in (None, 0.5, 0.8, 0.99)] == [None, None, "yellow", "red"]

    def test_yaml_says_what_json_says(self):
        import yaml

        value = {"a": [1, None], "b": Output.WIDE}
        assert yaml.safe_load(document(value, Output.YAML)) == json.loads(document(value, Output.JSON))


class TestProgram:
    def test_help_lists_every_command_and_what_it_ends_with_and_imports_none(self):
        code = "import sys; from aliquot.__main__ import main; main(['--help'], standalone_mode=False); print(sorted(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for word in ("top", "get", "describe", "cordon", "uncordon", "drift", "doctor", "demo", "completion", "Exit status"):
            assert word in done.stdout
        loaded = done.stdout.rpartition("[")[2]
        for module in ("aliquot.cli.top", "kubernetes", "grpc", "urllib3", "pynvml", "prometheus_client", "yaml", "msgspec"):
            assert f"'{module}'" not in loaded

    @pytest.mark.parametrize("name", ["top", "get", "describe", "cordon", "uncordon", "drift", "doctor", "completion"])
    def test_every_command_has_help(self, name):
        done = CliRunner().invoke(main, [name, "--help"])
        assert done.exit_code == 0
        assert "Usage" in done.output

    def test_an_unknown_command_ends_with_2(self):
        assert CliRunner().invoke(main, ["tip"]).exit_code == 2

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_completion_scripts_call_the_program(self, shell):
        done = CliRunner().invoke(main, ["completion", shell])
        assert "_ALIQUOT_COMPLETE" in done.output

    def test_kubectl_gets_its_words_and_its_directive(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["kubectl_complete-vgpu", "desc"])
        kubectl_complete()
        *words, directive = capsys.readouterr().out.splitlines()
        assert [word.partition("\t")[0] for word in words] == ["describe"]
        assert directive == ":4"

    def test_every_installed_program_can_be_called(self):
        scripts = tomllib.loads((SOURCE_ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        assert {"aliquot", "kubectl-vgpu", "kubectl_complete-vgpu"} <= scripts.keys()
        for name, target in scripts.items():
            module, _, function = target.partition(":")
            assert callable(getattr(importlib.import_module(module), function)), name

    def test_a_cluster_that_hangs_offers_nothing_and_holds_nobody_up(self, monkeypatch, capfd):
        released = threading.Event()
        monkeypatch.setattr(live, "PATIENCE_SECONDS", 0.2)
        monkeypatch.setattr(live, "connect", lambda *_: released.wait(60))
        begun = time.monotonic()
        assert candidates(["get", "nodes", ""]) == []
        assert time.monotonic() - begun < 10
        released.set()
        assert capfd.readouterr() == ("", "")

    def test_a_cluster_that_cannot_be_asked_offers_nothing_and_says_nothing(self, monkeypatch, capfd):
        def fail(*_: object) -> None:
            raise AccessError("no cluster")

        monkeypatch.setattr(live, "connect", fail)
        assert candidates(["cordon", ""]) == []
        assert capfd.readouterr() == ("", "")

    def test_words_are_completed(self):
        assert [word.partition("\t")[0] for word in candidates(["unc"])] == ["uncordon"]
        assert [word.partition("\t")[0] for word in candidates(["top", "n"])] == ["nodes"]
        assert any(word.startswith("--watch") for word in candidates(["top", "--w"]))
        assert [word.partition("\t")[0] for word in candidates(["get", "pods", "-o", "y"])] == ["yaml"]
