# SPDX-License-Identifier: Apache-2.0
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

from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.model import ContainerAssignment, DeviceShare, PodAssignment
from aliquot.contract.units import MIB
from aliquot.paths import SOURCE_ROOT
from aliquot_cli import cordon, drift, live, top
from aliquot_cli.__main__ import main
from aliquot_cli.completion import candidates, kubectl_complete
from aliquot_cli.errors import AccessError, NotFoundError
from aliquot_cli.output import Cell, Column, Output, document, heat, memory, table
from aliquot_cli.pods import gpu_pods, pod_of, requests_gpus
from tests.unit.aliquot_cli.clusters import METRICS, FakeCluster, agent_pod, gpu_node
from tests.unit.aliquot_cli.test_model import PAGE


class TestTop:
    def look(self, *pages: str, kind: str = "shares", output: Output = Output.TABLE, sort: str | None = None) -> list[str]:
        """Look as often as there are pages, the agent's page another one each time."""
        cluster = FakeCluster(gpu_node())
        readings = top.pages(cluster, top.Query(kind, (), None, "", sort, output), 0.0, len(pages))
        shown = []
        for page in pages:
            cluster.pages[PAGE] = page
            shown.append(next(readings))
        return shown

    def test_first_sample_shows_seconds_and_next_shows_rate(self):
        first, second = self.look(METRICS, METRICS.replace("} 4.0", "} 4.1"))
        assert "4.0s" in first
        assert "4.0s" not in second
        assert "%" in second

    def test_paused_share_is_shown_as_paused(self):
        sample = 'aliquot_container_paused{namespace="default",pod="train",container="main",device_uuid="GPU-aaaa-0"} '
        for value, shown in (("1", True), ("0", False)):
            (page,) = self.look(f"{METRICS}{sample}{value}\n")
            assert ("paused" in click.unstyle(page).splitlines()[1].split()) is shown

    def test_without_scraper_first_reading_takes_two_samples(self, monkeypatch):
        waited: list[float] = []
        monkeypatch.setattr("aliquot_cli.top.time.sleep", waited.append)
        busy = 'aliquot_container_busy_seconds_total{namespace="default",pod="train",container="main",device_uuid="GPU-aaaa-0"} 7\n'
        (page,) = self.look(METRICS + busy)
        assert waited == [top.RATE_SECONDS]
        assert "0%" in page.splitlines()[1]

    def test_unenforced_limit_is_marked(self):
        (page,) = self.look(METRICS, output=Output.WIDE)
        assert "NO" in click.unstyle(page).splitlines()[1].split()

    def test_unknown_value_is_dash_and_sorted_last(self):
        (page,) = self.look(METRICS, sort="used")
        assert [line.split()[3] for line in page.splitlines()[1:]] == ["train", "hard"]
        assert "-/-" in page

    def test_scripts_get_the_same_facts(self):
        (page,) = self.look(METRICS, output=Output.JSON)
        (node,) = json.loads(page)["nodes"]
        assert node["gpus"][0]["shares"][0]["limit_bytes"] == 100 * MIB


class TestCordon:
    def change(self, cluster: FakeCluster, name: str, how) -> bool:
        return cordon.apply(cluster, cordon.select(cluster, name), how)

    def test_a_gpu_is_put_into_the_spec_and_taken_out_again(self):
        cluster = FakeCluster(gpu_node())
        assert self.change(cluster, "n1/1", cordon._cordoned)
        assert cluster.objects["n1"]["spec"] == {"cordonedDevices": ["GPU-bbbb-1"]}
        assert not self.change(cluster, "n1/1", cordon._cordoned)
        assert self.change(cluster, "n1/0", cordon._cordoned)
        assert self.change(cluster, "n1/1", cordon._uncordoned)
        assert cluster.objects["n1"]["spec"] == {"cordonedDevices": ["GPU-aaaa-0"]}
        assert self.change(cluster, "n1/0", cordon._uncordoned)
        assert cluster.objects["n1"]["spec"] == {}

    def test_cordon_of_node_leaves_single_gpu_cordons_unchanged(self):
        cluster = FakeCluster(gpu_node(cordoned_devices=("GPU-aaaa-0",)))
        self.change(cluster, "n1", cordon._cordoned)
        assert cluster.objects["n1"]["spec"] == {"cordoned": True, "cordonedDevices": ["GPU-aaaa-0"]}
        self.change(cluster, "n1", cordon._uncordoned)
        assert cluster.objects["n1"]["spec"] == {"cordonedDevices": ["GPU-aaaa-0"]}

    def test_concurrent_change_is_kept_after_retry(self):
        cluster = FakeCluster(gpu_node())
        cluster.conflicts = 2
        assert self.change(cluster, "n1/0", cordon._cordoned)
        assert cluster.objects["n1"]["spec"] == {"cordonedDevices": ["GPU-aaaa-0"]}

    def test_change_fails_after_all_retries(self):
        cluster = FakeCluster(gpu_node())
        cluster.conflicts = 99
        with pytest.raises(AccessError, match="run the command again"):
            self.change(cluster, "n1/0", cordon._cordoned)

    def test_a_cluster_without_objects_has_nothing_to_cordon(self):
        with pytest.raises(NotFoundError, match="GpuNode"):
            cordon.select(FakeCluster(installed=False), "n1")


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

    def test_only_pods_with_gpu_resource_are_listed(self):
        assert requests_gpus(self.pod({contract.RESOURCE_VGPU_MEMORY: "10"}))
        assert not requests_gpus(self.pod({"cpu": "1"}))
        assert not requests_gpus({"metadata": {}, "spec": {"containers": [{"name": "x"}]}})

    def test_amounts_and_further_resources_are_read(self):
        pod = pod_of(self.pod({contract.RESOURCE_VGPU: "2", contract.RESOURCE_VGPU_MEMORY: "64", "nvidia.com/mig-1g.10gb": "1"}))
        assert (pod.vgpus, pod.memory_bytes, pod.cores_percent) == (2, 64 * MIB, None)
        assert pod.other == {"nvidia.com/mig-1g.10gb": "1"}

    def test_percentage_is_an_amount_once_devices_are_assigned(self):
        waiting = self.pod({contract.RESOURCE_VGPU: "2", contract.RESOURCE_VGPU_MEMORY_PERCENT: "50"})
        assert (pod_of(waiting).memory_bytes, pod_of(waiting).other) == (None, {contract.RESOURCE_VGPU_MEMORY_PERCENT: "50"})
        shares = (DeviceShare("GPU-a", 100 * MIB), DeviceShare("GPU-b", 200 * MIB))
        text = codec.encode_assignment(PodAssignment("u", (ContainerAssignment("main", shares),)))
        bound = {**waiting, "metadata": {"uid": "u", "annotations": {contract.ANNOTATION_ASSIGNMENT: text}}}
        assert pod_of(bound).memory_bytes == 300 * MIB

    def test_waiting_reason_comes_from_scheduler_or_kubelet(self):
        unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes have room"}
        assert pod_of(self.pod({}, phase="Pending", conditions=[unscheduled])).waits_for == "0/3 nodes have room"
        refused = {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "aliquot: no room"}}}
        assert pod_of(self.pod({}, phase="Pending", containerStatuses=[refused])).waits_for == "aliquot: no room"
        assert pod_of(self.pod({}, phase="Running", conditions=[unscheduled])).waits_for == ""

    def test_assignment_of_another_pod_is_ignored(self):
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
        """Query a cluster where all agents answer that they found no difference."""
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
        assert (result.exit_code, result.stdout, result.stderr) == (1, "no differences on 1 nodes\n", "n2: no agent runs there\n")
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
    def test_invalid_drift_page_is_error(self, page):
        with pytest.raises(AccessError, match="n1"):
            drift.differences("n1", page)


class TestOutput:
    def test_columns_are_aligned_without_trailing_space(self):
        columns: tuple[Column[str], ...] = (
            Column("NAME", lambda row: row),
            Column("LENGTH", lambda row: str(len(row))),
            Column("X", str, wide=True),
        )
        assert table(columns, ["a", "long-name"], Output.TABLE) == ["NAME        LENGTH", "a           1", "long-name   9"]
        assert table(columns, ["a"], Output.WIDE)[0].endswith("X")

    def test_colour_does_not_move_columns(self):
        columns: tuple[Column[str], ...] = (Column("N", lambda row: Cell(row, "red")), Column("M", lambda _: "m"))
        lines = table(columns, ["a", "bbb"], Output.TABLE)
        assert [click.unstyle(line) for line in lines] == ["N     M", "a     m", "bbb   m"]
        assert "\x1b" in lines[1]

    def test_amounts_are_short(self):
        assert [memory(value) for value in (None, 0, 512 * MIB, 1536 * MIB)] == ["-", "0Mi", "512Mi", "1.5Gi"]
        assert [heat(ratio, "x").colour for ratio in (None, 0.5, 0.8, 0.99)] == [None, None, "yellow", "red"]

    def test_yaml_equals_json(self):
        import yaml

        value = {"a": [1, None], "b": Output.WIDE}
        assert yaml.safe_load(document(value, Output.YAML)) == json.loads(document(value, Output.JSON))


class TestProgram:
    def test_help_lists_commands_and_exit_codes_without_imports(self):
        code = "import sys; from aliquot_cli.__main__ import main; main(['--help'], standalone_mode=False); print(sorted(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for word in ("top", "get", "describe", "cordon", "uncordon", "drift", "doctor", "demo", "completion", "Exit status"):
            assert word in done.stdout
        loaded = done.stdout.rpartition("[")[2]
        for module in ("aliquot_cli.top", "kubernetes", "grpc", "urllib3", "pynvml", "prometheus_client", "yaml", "msgspec"):
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

    def test_kubectl_gets_completions_and_directive(self, monkeypatch, capsys):
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

    def test_hanging_cluster_completes_nothing_and_delays_no_shell(self, monkeypatch, capfd):
        released = threading.Event()
        monkeypatch.setattr(live, "PATIENCE_SECONDS", 0.2)
        monkeypatch.setattr(live, "connect", lambda *_: released.wait(60))
        begun = time.monotonic()
        assert candidates(["get", "nodes", ""]) == []
        assert time.monotonic() - begun < 10
        released.set()
        assert capfd.readouterr() == ("", "")

    def test_unreachable_cluster_completes_nothing_silently(self, monkeypatch, capfd):
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
