# SPDX-License-Identifier: Apache-2.0
"""The API server stand-in keeps the rules of list, watch and patch that a controller relies on."""

import json
import threading
import time

import pytest
import urllib3

from aliquot_lab.standin.apiserver import ApiServer
from aliquot_lab.standin.cluster import Cluster, Kind

pytestmark = pytest.mark.timeout(60)
HTTP = urllib3.PoolManager(retries=False, timeout=10)


@pytest.fixture
def api():
    server = ApiServer(Cluster(), bookmark_seconds=0.2)
    server.start()
    yield server
    server.stop()


def pod(name="pod", node="node-1", **status):
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"nodeName": node}, "status": {"phase": "Pending", **status}}


def call(api, method, path, body=None, content_type="application/json", **headers):
    data = None if body is None else json.dumps(body)
    response = HTTP.request(method, api.url + path, body=data, headers={"Content-Type": content_type, **headers})
    return response.status, json.loads(response.data)


class Watch:
    """Collects the events of one watch in a thread."""

    def __init__(self, api, query):
        self.events = []
        self.ended = threading.Event()
        self._response = HTTP.request("GET", f"{api.url}/api/v1/pods?watch=1&{query}", preload_content=False)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            for line in self._response:
                self.events.append(json.loads(line))
        except urllib3.exceptions.HTTPError:
            pass
        self.ended.set()

    def types(self, count):
        until(lambda: len(self.events) >= count)
        return [(event["type"], event["object"]["metadata"].get("name")) for event in self.events]


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


class TestListAndGet:
    def test_a_list_carries_the_version_from_which_to_watch(self, api):
        api.cluster.create(Kind.POD, pod())
        status, body = call(api, "GET", "/api/v1/pods")
        assert (status, body["kind"], len(body["items"])) == (200, "PodList", 1)
        assert int(body["metadata"]["resourceVersion"]) == api.cluster.version

    def test_a_field_selector_picks_the_pods_of_a_node(self, api):
        for name, node in (("a", "node-1"), ("b", "node-2")):
            api.cluster.create(Kind.POD, pod(name, node))
        _, body = call(api, "GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-1")
        assert [item["metadata"]["name"] for item in body["items"]] == ["a"]
        _, body = call(api, "GET", "/api/v1/pods?fieldSelector=spec.nodeName!%3Dnode-1,status.phase%3D%3DPending")
        assert [item["metadata"]["name"] for item in body["items"]] == ["b"]

    def test_a_list_may_have_to_be_of_a_version_at_least(self, api):
        api.cluster.create(Kind.POD, pod())
        version, of = api.cluster.version, "/api/v1/pods?resourceVersionMatch=NotOlderThan&resourceVersion"
        assert [call(api, "GET", f"{of}={asked}")[0] for asked in (0, version, version + 1)] == [200, 200, 504]
        api.cache_version = version - 1
        assert [call(api, "GET", f"{of}={asked}")[0] for asked in (version - 1, version)] == [200, 504]
        assert call(api, "GET", "/api/v1/pods")[0] == 200

    @pytest.mark.parametrize("query", ["resourceVersionMatch=NotOlderThan", "resourceVersionMatch=Exact&resourceVersion=1"])
    def test_other_version_preferences_are_refused(self, api, query):
        assert call(api, "GET", f"/api/v1/pods?{query}")[0] == 422

    def test_a_malformed_selector_is_refused(self, api):
        assert call(api, "GET", "/api/v1/pods?fieldSelector=spec.nodeName")[0] == 422

    def test_what_is_not_there_is_a_status_of_404(self, api):
        status, body = call(api, "GET", "/api/v1/namespaces/default/pods/nobody")
        assert (status, body["kind"], body["reason"]) == (404, "Status", "NotFound")

    @pytest.mark.parametrize("path", ["/api/v1/secrets", "/apis/apps/v1/deployments", "/api/v1/pods/nobody", "/api/v1/nodes/n/proxy"])
    def test_paths_of_other_resources_are_not_found(self, api, path):
        assert call(api, "GET", path)[0] == 404

    def test_the_bearer_token_is_checked(self, api):
        api.token = "right"
        assert call(api, "GET", "/api/v1/pods")[0] == 401
        assert call(api, "GET", "/api/v1/pods", Authorization="Bearer right")[0] == 200


class TestWatch:
    def test_changes_after_the_version_are_seen_in_order(self, api):
        version = api.cluster.version
        api.cluster.create(Kind.POD, pod())
        watch = Watch(api, f"resourceVersion={version}")
        api.cluster.update(Kind.POD, "default", "pod", lambda item: item["status"].update(phase="Running"))
        api.cluster.delete(Kind.POD, "default", "pod")
        assert [kind for kind, _ in watch.types(3)] == ["ADDED", "MODIFIED", "DELETED"]
        versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in watch.events[:3]]
        assert versions == sorted(set(versions))

    def test_without_a_version_it_begins_with_what_is_there(self, api):
        api.cluster.create(Kind.POD, pod())
        assert Watch(api, "").types(1) == [("ADDED", "pod")]

    def test_a_selector_sees_objects_enter_and_leave(self, api):
        watch = Watch(api, f"resourceVersion={api.cluster.version}&fieldSelector=status.phase%3DRunning")
        api.cluster.create(Kind.POD, pod())
        for phase in ("Running", "Running", "Succeeded"):
            api.cluster.update(Kind.POD, "default", "pod", lambda item, phase=phase: item["status"].update(phase=phase, reason=phase))
        assert watch.types(2) == [("ADDED", "pod"), ("DELETED", "pod")]

    def test_bookmarks_bring_the_version_forward_without_changes_of_the_kind(self, api):
        watch = Watch(api, f"resourceVersion={api.cluster.version}&allowWatchBookmarks=true")
        api.cluster.create(Kind.NODE, {"metadata": {"name": "other"}})
        until(lambda: any(int(event["object"]["metadata"]["resourceVersion"]) == api.cluster.version for event in watch.events))
        assert {event["type"] for event in watch.events} == {"BOOKMARK"}

    def test_there_are_no_bookmarks_for_who_did_not_ask(self, api):
        watch = Watch(api, f"resourceVersion={api.cluster.version}&timeoutSeconds=1")
        assert watch.ended.wait(5)
        assert watch.events == []

    def test_a_version_that_was_compacted_away_is_an_error_event_410(self, api):
        version = api.cluster.version
        api.cluster.create(Kind.POD, pod())
        api.cluster.compact()
        watch = Watch(api, f"resourceVersion={version}")
        assert watch.ended.wait(5)
        (event,) = watch.events
        assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")

    def test_a_running_watch_ends_with_410_when_the_history_is_lost(self, api):
        watch = Watch(api, f"resourceVersion={api.cluster.version}")
        api.cluster.compact()
        assert watch.ended.wait(5)
        assert watch.events[-1]["object"]["code"] == 410

    def test_watches_can_be_broken_and_taken_up_again(self, api):
        version = api.cluster.version
        watch = Watch(api, f"resourceVersion={version}")
        api.break_watches()
        assert watch.ended.wait(5)
        api.cluster.create(Kind.POD, pod())
        assert Watch(api, f"resourceVersion={version}").types(1) == [("ADDED", "pod")]

    def test_an_outage_cuts_everything_off_and_ends(self, api):
        watch = Watch(api, f"resourceVersion={api.cluster.version}")
        with api.outage():
            assert watch.ended.wait(5)
            with pytest.raises(urllib3.exceptions.HTTPError):
                call(api, "GET", "/api/v1/pods")
        assert call(api, "GET", "/api/v1/pods")[0] == 200


class TestPatch:
    JSON_PATCH = "application/json-patch+json"
    MERGE_PATCH = "application/merge-patch+json"

    @pytest.fixture
    def node(self, api):
        api.cluster.create(Kind.NODE, {"metadata": {"name": "n"}, "spec": {"x": 1}, "status": {"capacity": {"cpu": "4"}}})

    def test_json_patch_adds_resource_with_slash_in_name(self, api, node):
        operations = [{"op": "add", "path": "/status/capacity/nvidia.com~1vgpu-memory", "value": "1024"}]
        status, body = call(api, "PATCH", "/api/v1/nodes/n/status", operations, self.JSON_PATCH)
        assert (status, body["status"]["capacity"]) == (200, {"cpu": "4", "nvidia.com/vgpu-memory": "1024"})

    def test_a_failed_operation_changes_nothing(self, api, node):
        operations = [{"op": "replace", "path": "/status/capacity/cpu", "value": "8"}, {"op": "remove", "path": "/status/capacity/none"}]
        assert call(api, "PATCH", "/api/v1/nodes/n/status", operations, self.JSON_PATCH)[0] == 422
        assert api.cluster.get(Kind.NODE, "", "n")["status"]["capacity"] == {"cpu": "4"}

    def test_the_status_subresource_changes_only_the_status(self, api, node):
        patch = {"spec": {"x": 2}, "status": {"capacity": {"cpu": "8"}}}
        call(api, "PATCH", "/api/v1/nodes/n/status", patch, self.MERGE_PATCH)
        item = api.cluster.get(Kind.NODE, "", "n")
        assert (item["spec"], item["status"]["capacity"]) == ({"x": 1}, {"cpu": "8"})

    def test_the_object_itself_changes_without_its_status(self, api, node):
        patch = {"metadata": {"labels": {"a": "b"}}, "spec": {"x": 2}, "status": {"capacity": {"cpu": "8"}}}
        call(api, "PATCH", "/api/v1/nodes/n", patch, self.MERGE_PATCH)
        item = api.cluster.get(Kind.NODE, "", "n")
        assert (item["metadata"]["labels"], item["spec"], item["status"]["capacity"]) == ({"a": "b"}, {"x": 2}, {"cpu": "4"})

    def test_null_in_a_merge_patch_removes(self, api, node):
        call(api, "PATCH", "/api/v1/nodes/n/status", {"status": {"capacity": {"cpu": None}}}, self.MERGE_PATCH)
        assert api.cluster.get(Kind.NODE, "", "n")["status"]["capacity"] == {}

    def test_a_patch_for_an_old_version_is_a_conflict(self, api, node):
        patch = {"metadata": {"resourceVersion": "1"}, "status": {"capacity": {"cpu": "8"}}}
        assert call(api, "PATCH", "/api/v1/nodes/n/status", patch, self.MERGE_PATCH)[0] == 409

    def test_a_patch_of_an_unknown_type_is_refused(self, api, node):
        assert call(api, "PATCH", "/api/v1/nodes/n", {}, "application/apply-patch+yaml")[0] == 415


class TestCreateAndDelete:
    def test_events_are_created_and_listed_in_their_namespace(self, api):
        body = {"metadata": {"generateName": "pod."}, "involvedObject": {"name": "pod"}, "reason": "AliquotRefused", "message": "no"}
        status, created = call(api, "POST", "/api/v1/namespaces/team/events", body)
        assert (status, created["metadata"]["namespace"]) == (201, "team")
        _, listing = call(api, "GET", "/api/v1/namespaces/team/events?fieldSelector=involvedObject.name%3Dpod")
        assert [item["reason"] for item in listing["items"]] == ["AliquotRefused"]

    def test_a_second_object_of_a_name_is_refused(self, api):
        assert call(api, "POST", "/api/v1/namespaces/default/pods", pod())[0] == 201
        status, body = call(api, "POST", "/api/v1/namespaces/default/pods", pod())
        assert (status, body["reason"]) == (409, "AlreadyExists")

    def test_a_deleted_pod_stays_until_its_kubelet_is_done(self, api):
        api.cluster.create(Kind.POD, pod())
        call(api, "DELETE", "/api/v1/namespaces/default/pods/pod")
        assert "deletionTimestamp" in api.cluster.get(Kind.POD, "default", "pod")["metadata"]

    def test_requests_are_remembered_for_tests(self, api):
        call(api, "GET", "/api/v1/nodes")
        assert api.requests == [("GET", "/api/v1/nodes")]


GPU_NODES = "/apis/aliquot.dev/v1alpha1/gpunodes"
GPU_NODE = {"apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "node-1"}, "status": {"summary": "not taken"}}


class TestGpuNodes:
    def test_they_are_cluster_scoped_and_status_is_written_on_its_own(self, api):
        status, created = call(api, "POST", GPU_NODES, GPU_NODE)
        assert (status, "status" in created, "namespace" in created["metadata"]) == (201, False, False)
        patch = [
            {"op": "add", "path": "/status", "value": {"summary": "none"}},
            {"op": "add", "path": "/spec", "value": {"cordoned": True}},
        ]
        status, patched = call(api, "PATCH", f"{GPU_NODES}/node-1/status", patch, "application/json-patch+json")
        assert (status, patched["status"], "spec" in patched) == (200, {"summary": "none"}, False)
        _, listing = call(api, "GET", f"{GPU_NODES}?fieldSelector=metadata.name%3Dnode-1")
        assert (listing["apiVersion"], listing["kind"], len(listing["items"])) == ("aliquot.dev/v1alpha1", "GpuNodeList", 1)
        assert call(api, "GET", f"{GPU_NODES}?fieldSelector=metadata.name%3Dother")[1]["items"] == []

    def test_without_resource_definition_no_object_exists(self):
        server = ApiServer(Cluster(), gpu_nodes=False)
        server.start()
        try:
            assert call(server, "GET", GPU_NODES)[0] == 404
            assert call(server, "POST", GPU_NODES, GPU_NODE)[0] == 404
        finally:
            server.stop()

    def test_the_strategic_form_of_a_patch_is_for_built_in_kinds_only(self, api):
        call(api, "POST", GPU_NODES, GPU_NODE)
        strategic = "application/strategic-merge-patch+json"
        assert call(api, "PATCH", f"{GPU_NODES}/node-1/status", {"status": {}}, strategic)[0] == 415
        api.cluster.create(Kind.NODE, {"metadata": {"name": "n"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        ours = {"status": {"conditions": [{"type": "Ours", "status": "False"}]}}
        _, node = call(api, "PATCH", "/api/v1/nodes/n/status", ours, strategic)
        assert [condition["type"] for condition in node["status"]["conditions"]] == ["Ready", "Ours"]
