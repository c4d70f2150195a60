from dataclasses import replace

import pytest

from aliquot.cli.errors import AccessError, NotFoundError
from aliquot.cli.model import lacks_rates, node_of, since
from aliquot.cli.names import find_gpu
from aliquot.cli.scrape import read_metrics
from aliquot.cli.source import SYSTEM_NAMESPACE, agents, nodes
from proto.units import MIB
from tests.unit.aliquot.cli.clusters import METRICS, FakeCluster, agent_pod, gpu, gpu_node

PAGE = "/api/v1/namespaces/aliquot-system/pods/agent-n1:9999/proxy/metrics"


def cluster(**options) -> FakeCluster:
    made = FakeCluster(gpu_node(), **options)
    made.pages[PAGE] = METRICS
    return made


class TestScrape:
    def test_only_what_is_wanted_is_read(self):
        found = read_metrics(METRICS, ["device_health", "absent"])
        assert [sample.value for sample in found["device_health"]] == [1.0, 0.0]
        assert found["absent"] == []
        assert "container_info" not in found

    def test_labels_are_unescaped(self):
        (sample,) = read_metrics('aliquot_x{a="q\\"b\\\\c\\nd",b="}"} 2\n', ["x"])["x"]
        assert sample.labels == {"a": 'q"b\\c\nd', "b": "}"}
        assert sample.value == 2

    def test_lines_of_another_form_are_passed_over(self):
        text = 'aliquot_x{a="b"} \naliquot_x{a="b"} many\naliquot_x 3\naliquot_x\n# aliquot_x 4\n'
        assert [sample.value for sample in read_metrics(text, ["x"])["x"]] == [3]


class TestPicture:
    def test_object_and_metrics_make_one_node(self):
        (node,) = nodes(cluster())
        first, second = node.gpus
        assert (first.healthy, second.healthy) == (True, False)
        assert first.slices[0].used_of_limit == pytest.approx(0.96)
        assert second.slices[0].device_uuid == "MIG-1"
        assert (node.driver_version, node.agent_version) == ("580.1", "0.1.0")

    def test_without_the_object_the_metrics_name_the_gpus(self):
        (node,) = nodes(cluster(installed=False))
        assert [gpu.uuid for gpu in node.gpus] == ["GPU-aaaa-0", "GPU-bbbb-1"]

    def test_without_an_agent_the_object_names_the_gpus_and_what_is_used_is_not_known(self):
        (node,) = nodes(cluster(pods=[]))
        assert node.trouble == "no agent runs there"
        assert [gpu.used_bytes for gpu in node.gpus] == [None, None]
        assert node.total("used_bytes") is None

    def test_an_agent_that_does_not_answer_is_said_not_to(self):
        silent = cluster()
        silent.pages.clear()
        (node,) = nodes(silent)
        assert "503" in node.trouble

    def test_cordons_are_of_the_object(self):
        described = gpu_node("n1", gpu(0, "GPU-aaaa-0"), gpu(1, "GPU-bbbb-1"), cordoned_devices=("GPU-aaaa-0",))
        assert [gpu.cordoned for gpu in node_of("n1", described, METRICS).gpus] == [True, False]
        assert [gpu.cordoned for gpu in node_of("n1", replace(described, cordoned=True), METRICS).gpus] == [True, True]

    def test_a_name_that_is_no_node_is_an_error_that_names_those_there_are(self):
        with pytest.raises(NotFoundError, match="n9; there are n1"):
            nodes(cluster(), ["n9"])

    def test_of_two_agents_on_a_node_the_one_that_runs_is_asked(self):
        found = agents(
            FakeCluster(pods=[agent_pod(phase="Failed"), {**agent_pod(), "metadata": {**agent_pod()["metadata"], "name": "new"}}])
        )
        assert found["n1"].pod == "new"
        assert found["n1"].port == 9999

    def test_agents_are_found_by_somebody_who_may_look_into_their_namespace_only(self):
        class OneNamespace(FakeCluster):
            def get(self, path, query=None):
                if not path.startswith(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/"):
                    raise AccessError(f"{path}: 403")
                return super().get(path, query)

        assert agents(OneNamespace()).keys() == {"n1"}


def test_throttling_is_rated_over_the_time_between_two_looks():
    before = node_of("n1", None, METRICS)
    after = node_of("n1", None, METRICS.replace("} 4.0", "} 5.0"))
    (rated,) = since([after], [before], 2.0)
    assert rated.gpus[0].slices[0].throttled_ratio == 0.5
    assert rated.gpus[1].slices[0].throttled_ratio is None


def test_a_rate_that_the_agent_does_not_say_is_made_of_two_looks():
    busy = 'aliquot_container_busy_seconds_total{namespace="default",pod="train",container="main",device_uuid="GPU-aaaa-0"} '
    before, after = (node_of("n1", None, f"{METRICS}{busy}{value}\n") for value in (7, 7.5))
    assert lacks_rates([before])
    assert since([after], [before], 2.0)[0].gpus[0].slices[0].utilization_ratio == 0.25
    said = busy.replace("busy_seconds_total", "utilization_ratio") + "0.9\n"
    told = node_of("n1", None, f"{METRICS}{busy}8\n{said}")
    assert not lacks_rates([told])
    assert since([told], [before], 2.0)[0].gpus[0].slices[0].utilization_ratio == 0.9


class TestNames:
    NODES = (node_of("n1", gpu_node(), None),)

    @pytest.mark.parametrize("name", ["GPU-aaaa-0", "GPU-aa", "n1/0"])
    def test_a_gpu_has_several_names(self, name):
        assert find_gpu(self.NODES, name).uuid == "GPU-aaaa-0"

    @pytest.mark.parametrize("name", ["GPU-", "n1/7", "GPU-cccc"])
    def test_what_names_none_is_an_error_that_says_how_to_name_one(self, name):
        with pytest.raises(NotFoundError, match="n1/0"):
            find_gpu(self.NODES, name)

    def test_a_beginning_that_fits_several_is_an_error(self):
        twins = node_of("n1", gpu_node("n1", gpu(0, "GPU-aaaa-0"), gpu(1, "GPU-aaaa-1")), None)
        with pytest.raises(NotFoundError, match="write more"):
            find_gpu([twins], "GPU-aaaa")


def test_amounts_are_in_bytes():
    (node,) = nodes(cluster())
    assert node.gpus[0].slices[0].limit_bytes == 100 * MIB
