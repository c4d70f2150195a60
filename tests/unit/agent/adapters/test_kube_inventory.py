# SPDX-License-Identifier: Apache-2.0
"""The gpunodes object and the node's condition, against an API server over HTTP that keeps Kubernetes' rules."""

import json

import msgspec
import pytest

from agent.adapters import kube_watch
from agent.core.publishing import NodeCondition
from agent.ports.kube import NodeEvent
from aliquot import contract
from aliquot.contract import gpunode
from aliquot.contract.gpunode import NO_CORDON, Cordon, GpuNode
from aliquot.kube.errors import KubeNotFoundError
from aliquot_lab.standin.cluster import Kind
from tests.unit.agent.adapters.test_kube import NODE, api

__all__ = ["api"]

ILL = NodeCondition(False, "GPUsUnhealthy", "1 of 2 GPUs get no new work")


def node_of(api) -> dict:
    return api.cluster.get(Kind.NODE, "", NODE)


def seen(api, count: int) -> list:
    api.listener.wait(lambda: len(api.listener.gpu_nodes) >= count)
    return api.listener.gpu_nodes


class TestCondition:
    def test_condition_is_added_to_others_with_its_transition_time(self, api):
        ready = {"type": "Ready", "status": "True"}
        api.cluster.update(Kind.NODE, "", NODE, lambda node: node["status"].update(conditions=[ready]))
        api.client.publish_condition(NODE, ILL, turned=True)
        first = node_of(api)["status"]["conditions"]
        assert first[0] == ready
        assert (first[1]["type"], first[1]["status"]) == (contract.NODE_CONDITION_GPUS_HEALTHY, "False")
        api.client._clock.seconds += 60
        api.client.publish_condition(NODE, NodeCondition(False, "GPUsUnhealthy", "2 of 2"), turned=False)
        (_, second) = node_of(api)["status"]["conditions"]
        assert second["lastTransitionTime"] == first[1]["lastTransitionTime"] != second["lastHeartbeatTime"]

    def test_it_is_read_back_with_the_node(self, api):
        assert api.watch().node.gpus_healthy is None
        api.client.publish_condition(NODE, ILL, turned=True)
        api.listener.wait(lambda: api.listener.node.gpus_healthy == ILL)


class TestGpuNode:
    def test_it_is_made_for_the_node_and_its_status_is_replaced_whole(self, api):
        api.client.create_gpu_node(NODE, "node-uid")
        status = json.loads(gpunode.encode_gpu_node(GpuNode(NODE, driver_version="580", agent_version="1")))["status"]
        assert api.client.publish_gpu_node(NODE, status) == status
        smaller = {key: value for key, value in status.items() if key != "driverVersion"}
        assert api.client.publish_gpu_node(NODE, smaller) == smaller
        item = api.cluster.get(Kind.GPU_NODE, "", NODE)
        assert item["metadata"]["ownerReferences"] == [{"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "node-uid"}]
        assert gpunode.decode_gpu_node(json.dumps(item).encode()) == GpuNode(NODE, agent_version="1")

    def test_what_an_administrator_asks_survives_what_the_agent_writes(self, api):
        api.client.create_gpu_node(NODE, "node-uid")
        api.cluster.update(Kind.GPU_NODE, "", NODE, lambda item: item.update(spec={"cordoned": True}))
        api.client.publish_gpu_node(NODE, {"summary": "2 x T4"})
        assert api.cluster.get(Kind.GPU_NODE, "", NODE)["spec"] == {"cordoned": True}

    def test_one_that_is_not_there_is_absent(self, api):
        with pytest.raises(KubeNotFoundError):
            api.client.publish_gpu_node(NODE, {})

    def test_watch_reports_only_object_of_this_node_through_its_life(self, api):
        api.cluster.create(Kind.GPU_NODE, {"metadata": {"name": "node-2"}, "spec": {"cordoned": True}})
        api.watch()
        assert seen(api, 1) == [None]
        api.client.create_gpu_node(NODE, "node-uid")
        assert seen(api, 2)[1].cordon == NO_CORDON
        api.cluster.update(Kind.GPU_NODE, "", NODE, lambda item: item.update(spec={"cordonedDevices": ["GPU-1"]}))
        assert seen(api, 3)[2].cordon == Cordon(devices=("GPU-1",))
        api.cluster.update(Kind.GPU_NODE, "", NODE, lambda item: item.update(spec={"cordonedDevices": "GPU-1"}))
        assert (seen(api, 4)[3].cordon, "cordonedDevices" in seen(api, 4)[3].trouble) == (None, True)
        api.cluster.delete(Kind.GPU_NODE, "", NODE)
        assert seen(api, 5)[4] is None

    def test_cluster_without_definition_is_queried_rarely(self, api, monkeypatch):
        monkeypatch.setattr(kube_watch, "RULES", msgspec.structs.replace(kube_watch.RULES, absent_seconds=0.5))
        api.server.gpu_nodes = False
        api.watch()
        api.listener.wait(lambda: any(what == contract.GPU_NODE_PLURAL and trouble for what, trouble in api.listener.troubles))
        assert api.listener.gpu_nodes == []
        assert sum("gpunodes" in path for _, path in api.server.requests) == 1
        api.server.gpu_nodes = True
        assert seen(api, 1) == [None]


def test_an_event_about_the_node_is_kept_where_kubectl_looks(api):
    api.client.post_event(NodeEvent(NODE, "node-uid", "AliquotGpuUnhealthy", "GPU-1 is lost", warning=True), 0.0)
    ((event,)) = api.cluster.list(Kind.EVENT)[1]
    assert event["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "node-uid"}
    assert (event["metadata"]["namespace"], event["type"], event["source"]["host"]) == ("default", "Warning", NODE)
