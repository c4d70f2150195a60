# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from aliquot.contract.units import MIB
from aliquot_cli.errors import AccessError, NotFoundError
from aliquot_cli.model import lacks_rates, node_of, with_rates
from aliquot_cli.names import find_gpu
from aliquot_cli.scrape import read_metrics
from aliquot_cli.source import SYSTEM_NAMESPACE, agents, nodes
from tests.unit.aliquot_cli.clusters import METRICS, FakeCluster, agent_pod, gpu, gpu_node

PAGE = "/api/v1/namespaces/aliquot-system/pods/agent-n1:9999/proxy/metrics"


def cluster(**options) -> FakeCluster:
    made = FakeCluster(gpu_node(), **options)
    made.pages[PAGE] = METRICS
    return made


class TestScrape:
    def test_only_wanted_metrics_are_parsed(self):
        found = read_metrics(METRICS, ["device_health", "absent"])
        assert [sample.value for sample in found["device_health"]] == [1.0, 0.0]
        assert found["absent"] == []
        assert "container_info" not in found

    def test_labels_are_unescaped(self):
        (sample,) = read_metrics('aliquot_x{a="q\\"b\\\\c\\nd",b="}"} 2\n', ["x"])["x"]
        assert sample.labels == {"a": 'q"b\\c\nd', "b": "}"}
        assert sample.value == 2

    def test_lines_of_other_format_are_skipped(self):
        text = 'aliquot_x{a="b"} \naliquot_x{a="b"} many\naliquot_x 3\naliquot_x\n# aliquot_x 4\n'
        assert [sample.value for sample in read_metrics(text, ["x"])["x"]] == [3]


class TestPicture:
    def test_object_and_metrics_make_one_node(self):
        (node,) = nodes(cluster())
        first, second = node.gpus
        assert (first.healthy, second.healthy) == (True, False)
        assert first.shares[0].used_of_limit == pytest.approx(0.96)
        assert second.shares[0].device_uuid == "MIG-1"
        assert (node.driver_version, node.agent_version) == ("580.1", "0.1.0")

    def test_without_the_object_the_metrics_name_the_gpus(self):
        (node,) = nodes(cluster(installed=False))
        assert [gpu.uuid for gpu in node.gpus] == ["GPU-aaaa-0", "GPU-bbbb-1"]

    def test_without_agent_object_names_gpus_and_usage_is_unknown(self):
        (node,) = nodes(cluster(pods=[]))
        assert node.trouble == "no agent runs there"
        assert [gpu.used_bytes for gpu in node.gpus] == [None, None]
        assert node.total("used_bytes") is None

    def test_silent_agent_is_reported(self):
        silent = cluster()
        silent.pages.clear()
        (node,) = nodes(silent)
        assert "503" in node.trouble

    def test_cordons_come_from_gpunode_object(self):
        described = gpu_node("n1", gpu(0, "GPU-aaaa-0"), gpu(1, "GPU-bbbb-1"), cordoned_devices=("GPU-aaaa-0",))
        assert [gpu.cordoned for gpu in node_of("n1", described, METRICS).gpus] == [True, False]
        assert [gpu.cordoned for gpu in node_of("n1", replace(described, cordoned=True), METRICS).gpus] == [True, True]

    def test_unknown_node_name_is_error_that_lists_known_nodes(self):
        with pytest.raises(NotFoundError, match="n9; there are n1"):
            nodes(cluster(), ["n9"])

    def test_of_two_agents_on_node_running_one_is_queried(self):
        found = agents(
            FakeCluster(pods=[agent_pod(phase="Failed"), {**agent_pod(), "metadata": {**agent_pod()["metadata"], "name": "new"}}])
        )
        assert found["n1"].pod == "new"
        assert found["n1"].port == 9999

    def test_user_with_access_to_one_namespace_finds_agents(self):
        class OneNamespace(FakeCluster):
            def get(self, path, query=None):
                if not path.startswith(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/"):
                    raise AccessError(f"{path}: 403")
                return super().get(path, query)

        assert agents(OneNamespace()).keys() == {"n1"}


def test_throttled_ratio_covers_time_between_two_samples():
    before = node_of("n1", None, METRICS)
    after = node_of("n1", None, METRICS.replace("} 4.0", "} 5.0"))
    (rated,) = with_rates([after], [before], 2.0)
    assert rated.gpus[0].shares[0].throttled_ratio == 0.5
    assert rated.gpus[1].shares[0].throttled_ratio is None


def test_rate_missing_from_agent_is_computed_from_two_readings():
    busy = 'aliquot_container_busy_seconds_total{namespace="default",pod="train",container="main",device_uuid="GPU-aaaa-0"} '
    before, after = (node_of("n1", None, f"{METRICS}{busy}{value}\n") for value in (7, 7.5))
    assert lacks_rates([before])
    assert with_rates([after], [before], 2.0)[0].gpus[0].shares[0].utilization_ratio == 0.25
    said = busy.replace("busy_seconds_total", "utilization_ratio") + "0.9\n"
    reported = node_of("n1", None, f"{METRICS}{busy}8\n{said}")
    assert not lacks_rates([reported])
    assert with_rates([reported], [before], 2.0)[0].gpus[0].shares[0].utilization_ratio == 0.9


class TestNames:
    NODES = (node_of("n1", gpu_node(), None),)

    @pytest.mark.parametrize("name", ["GPU-aaaa-0", "GPU-aa", "n1/0"])
    def test_a_gpu_has_several_names(self, name):
        assert find_gpu(self.NODES, name).uuid == "GPU-aaaa-0"

    @pytest.mark.parametrize("name", ["GPU-", "n1/7", "GPU-cccc"])
    def test_selector_without_match_is_error_with_syntax(self, name):
        with pytest.raises(NotFoundError, match="n1/0"):
            find_gpu(self.NODES, name)

    def test_ambiguous_uuid_prefix_is_error(self):
        twins = node_of("n1", gpu_node("n1", gpu(0, "GPU-aaaa-0"), gpu(1, "GPU-aaaa-1")), None)
        with pytest.raises(NotFoundError, match="write more"):
            find_gpu([twins], "GPU-aaaa")


def test_amounts_are_in_bytes():
    (node,) = nodes(cluster())
    assert node.gpus[0].shares[0].limit_bytes == 100 * MIB
