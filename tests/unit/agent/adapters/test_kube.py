# SPDX-License-Identifier: Apache-2.0
"""List-watch, capacity and events against an API server over HTTP that keeps Kubernetes' rules."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from urllib.parse import parse_qsl

import msgspec
import pytest

from agent.adapters import kube_watch
from agent.adapters.kube_api import KubeApiClient, kube_connection
from agent.adapters.kube_watch import RULES, KubeWatcher
from agent.ports.kube import GpuNodeState, NodeState, PodEvent
from aliquot import contract
from aliquot.contract.model import ContainerState, ContainerStatus, Pod, RestartPolicy
from aliquot.kube.api_server import ApiServer as Server
from aliquot.kube.errors import KubeApiError, KubeNotFoundError, KubeRefusedError
from aliquot.kube.urllib3_transport import REQUEST_SECONDS, KubeConnection
from aliquot.kube.watch import ListWatch
from aliquot.kube.watch_thread import follow
from aliquot_lab.standin.apiserver import ApiServer
from aliquot_lab.standin.cluster import Cluster, Kind
from tests.fakes.overloaded_api import RETRY_AFTER_SECONDS, overloaded_api
from tests.unit.agent.fakes import FakeClock

NODE = "node-1"
TOKEN = "secret"


class Listener:
    """Keeps what it receives; called from the watching threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.pods: dict[str, Pod] = {}
        self.lists = 0
        self.node: NodeState | None = None
        self.gpu_nodes: list[GpuNodeState | None] = []
        self.troubles: list[tuple[str, str]] = []

    def pods_listed(self, pods: Sequence[Pod]) -> None:
        with self._changed:
            self.pods = {pod.name: pod for pod in pods}
            self.lists += 1
            self._changed.notify_all()

    def pod_changed(self, pod: Pod) -> None:
        with self._changed:
            self.pods[pod.name] = pod
            self._changed.notify_all()

    def pod_deleted(self, pod: Pod) -> None:
        with self._changed:
            self.pods.pop(pod.name, None)
            self._changed.notify_all()

    def node_changed(self, node: NodeState) -> None:
        with self._changed:
            self.node = node
            self._changed.notify_all()

    def gpu_node_seen(self, gpu_node: GpuNodeState | None) -> None:
        with self._changed:
            self.gpu_nodes.append(gpu_node)
            self._changed.notify_all()

    def api_trouble(self, what: str, trouble: str) -> None:
        with self._changed:
            self.troubles.append((what, trouble))
            self._changed.notify_all()

    def wait(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 60), (self.pods, self.node, self.troubles)


class Connection:
    """Notes from which version each watch of pods began."""

    def __init__(self, connection: KubeConnection, watched: list[int]) -> None:
        self._watched = watched
        self._connection = connection
        self.request = connection.request

    def stream(self, path: str, silence_seconds: float):
        if path.startswith("/api/v1/pods?") and (version := re.search(r"&watch=1&.*resourceVersion=([0-9]+)", path)):
            self._watched.append(int(version[1]))
        return self._connection.stream(path, silence_seconds)


class Api:
    """A cluster with a server, and what connects to it."""

    def __init__(self, tmp_path) -> None:
        self.cluster = Cluster()
        self.cluster.create(Kind.NODE, {"metadata": {"name": NODE}, "status": {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}}})
        self.server = ApiServer(self.cluster, token=TOKEN, bookmark_seconds=0.2)
        self.server.start()
        self.token_file = tmp_path / "token"
        self.token_file.write_text(f"{TOKEN}\n")
        self.settings = Server(self.server.url, self.token_file, None)
        self.client = KubeApiClient(kube_connection(self.settings), NODE, FakeClock())
        self.watched: list[int] = []
        self.watcher = KubeWatcher(self._connect, NODE)
        self.listener = Listener()

    def _connect(self, **options: Any) -> KubeConnection:
        # The watcher calls only the two methods that Connection has.
        return cast(KubeConnection, Connection(kube_connection(self.settings, **options), self.watched))

    def create_pod(self, name: str, node: str = NODE, **metadata) -> Mapping[str, Any]:
        spec = {
            "nodeName": node,
            "schedulerName": contract.SCHEDULER_NAME,
            "initContainers": [
                {"name": "init", "resources": {"limits": {"nvidia.com/vgpu": "1"}}},
                {"name": "side", "restartPolicy": "Always"},
            ],
            "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/vgpu": "2"}}}, {"name": "bare"}],
        }
        return self.cluster.create(Kind.POD, {"metadata": {"name": name, **metadata}, "spec": spec, "status": {"phase": "Pending"}})

    def watch(self) -> Listener:
        self.watcher.start(self.listener)
        self.listener.wait(lambda: self.listener.lists and self.listener.node)
        return self.listener

    def pod_lists(self) -> list[dict[str, str]]:
        """The queries of the lists of pods that were served, oldest first."""
        queries = [dict(parse_qsl(path.partition("?")[2])) for _, path in self.server.requests if path.startswith("/api/v1/pods?")]
        return [query for query in queries if "watch" not in query]

    def stop(self) -> None:
        self.watcher.stop()
        self.server.stop()


@pytest.fixture
def api(tmp_path):
    one = Api(tmp_path)
    yield one
    one.stop()


class TestWatch:
    def test_pods_of_this_node_are_listed_as_kubelet_starts_them(self, api):
        api.create_pod("a", annotations={"x": "y"})
        api.create_pod("elsewhere", node="node-2")
        listener = api.watch()
        assert list(listener.pods) == ["a"]
        pod = listener.pods["a"]
        assert [(spec.name, spec.init, spec.restartable, dict(spec.limits)) for spec in pod.containers] == [
            ("init", True, False, {"nvidia.com/vgpu": "1"}),
            ("side", True, True, {}),
            ("main", False, False, {"nvidia.com/vgpu": "2"}),
            ("bare", False, False, {}),
        ]
        assert {spec.restart_policy for spec in pod.containers} == {RestartPolicy.ALWAYS}
        assert (pod.namespace, pod.phase, pod.annotations, pod.scheduler_name) == (
            "default",
            "Pending",
            {"x": "y"},
            contract.SCHEDULER_NAME,
        )
        assert pod.uid

    def test_container_uses_claims_by_their_objects_names(self, api):
        claims = [{"name": "own", "resourceClaimName": "shared"}, {"name": "made", "resourceClaimTemplateName": "shape"}, {"name": "late"}]
        uses = [{"name": "own", "request": "gpu"}, {"name": "made"}, {"name": "late"}]
        extended = {"resourceClaimName": "counted", "requestMappings": [{"containerName": "main", "requestName": "container-0"}]}
        api.cluster.create(
            Kind.POD,
            {
                "metadata": {"name": "user"},
                "spec": {"nodeName": NODE, "resourceClaims": claims, "containers": [{"name": "main", "resources": {"claims": uses}}]},
                "status": {
                    "resourceClaimStatuses": [{"name": "made", "resourceClaimName": "user-made-x7"}],
                    "extendedResourceClaimStatus": extended,
                },
            },
        )
        (main,) = api.watch().pods["user"].containers
        assert main.claims == (("shared", "gpu"), ("user-made-x7", ""), ("counted", "container-0"))

    def test_a_container_restarts_as_its_pod_does_or_as_it_says_itself(self, api):
        api.create_pod("a")
        api.cluster.update(
            Kind.POD,
            "default",
            "a",
            lambda pod: pod["spec"].update(
                restartPolicy="Never",
                containers=[
                    {"name": "as-its-pod"},
                    {"name": "by-itself", "restartPolicy": "OnFailure"},
                    {"name": "of-tomorrow", "restartPolicy": "OnTuesdays"},
                    {"name": "by-rules", "restartPolicy": "Never", "restartPolicyRules": [{"action": "Restart"}]},
                ],
            ),
        )
        assert {spec.name: spec.restart_policy for spec in api.watch().pods["a"].containers} == {
            "init": RestartPolicy.NEVER,
            "side": RestartPolicy.ALWAYS,
            "as-its-pod": RestartPolicy.NEVER,
            "by-itself": RestartPolicy.ON_FAILURE,
            "of-tomorrow": RestartPolicy.ALWAYS,
            "by-rules": RestartPolicy.ALWAYS,
        }

    def test_container_progress_is_reported(self, api):
        api.create_pod("a")
        status = {
            "phase": "Running",
            "initContainerStatuses": [
                {"name": "init", "state": {"terminated": {"exitCode": 0}}, "containerID": "containerd://1"},
                {"name": "side", "state": {"terminated": {"exitCode": 137}}},
            ],
            "containerStatuses": [
                {"name": "main", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "containerID": "cri-o://2"},
                {"name": "bare", "state": {"waiting": {"reason": "ContainerCreating"}}, "containerID": ""},
            ],
        }
        api.cluster.update(Kind.POD, "default", "a", lambda pod: pod.update(status=status))
        assert api.watch().pods["a"].statuses == (
            ContainerStatus("init", ContainerState.COMPLETED, "1"),
            ContainerStatus("side", ContainerState.FAILED),
            ContainerStatus("main", ContainerState.RUNNING, "2"),
            ContainerStatus("bare", ContainerState.WAITING),
        )

    @pytest.mark.parametrize(
        ("hash_", "is_its_uid"), [("2f1d3c4b5a69788796a5b4c3d2e1f001", True), ("0c3c9f4e-6f0a-4a52-8f5e-5f6c2a1d9b77", False)]
    )
    def test_static_pod_is_known_by_kubelet_uid_and_cannot_be_impersonated(self, api, hash_, is_its_uid):
        annotations = {"kubernetes.io/config.mirror": "x", "kubernetes.io/config.hash": hash_}
        made = api.create_pod("a", annotations=annotations)
        assert api.watch().pods["a"].uid == (hash_ if is_its_uid else made["metadata"]["uid"])

    def test_changes_arrive_as_they_happen(self, api):
        listener = api.watch()
        api.create_pod("a")
        listener.wait(lambda: "a" in listener.pods)
        api.cluster.update(Kind.POD, "default", "a", lambda pod: pod["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))
        listener.wait(lambda: listener.pods["a"].deletion_requested)
        api.cluster.delete(Kind.POD, "default", "a")
        listener.wait(lambda: "a" not in listener.pods)

    def test_the_node_is_watched(self, api):
        listener = api.watch()
        assert listener.node.capacity == {"cpu": "8"}
        api.client.publish_capacity(NODE, {contract.RESOURCE_VGPU_MEMORY: 1000})
        listener.wait(lambda: contract.RESOURCE_VGPU_MEMORY in listener.node.capacity)

    def test_the_nodes_labels_are_read(self, api):
        listener = api.watch()
        assert listener.node.labels == {}
        labels = {"nvidia.com/mig.config.state": "pending"}
        api.cluster.update(Kind.NODE, "", NODE, lambda node: node["metadata"].setdefault("labels", {}).update(labels))
        listener.wait(lambda: listener.node.labels == labels)

    def test_a_watch_that_ends_goes_on_where_it_was(self, api):
        listener = api.watch()
        api.server.break_watches()
        api.create_pod("a")
        listener.wait(lambda: "a" in listener.pods)
        assert listener.lists == 1

    def test_after_lost_history_pods_are_listed_again(self, api):
        api.create_pod("gone")
        listener = api.watch()
        with api.server.outage():
            api.cluster.delete(Kind.POD, "default", "gone")
            api.create_pod("new")
            api.cluster.compact()
        listener.wait(lambda: list(listener.pods) == ["new"])
        assert listener.lists == 2

    def test_pods_are_listed_from_server_cache_and_never_stale(self, api):
        before = api.cluster.version
        listener = api.watch()
        with api.server.outage():
            api.create_pod("a")
            api.cluster.compact()
            compacted = api.cluster.version
        listener.wait(lambda: listener.lists == 2)
        first, second = api.pod_lists()
        assert first["resourceVersionMatch"] == second["resourceVersionMatch"] == "NotOlderThan"
        assert int(first["resourceVersion"]) >= before
        assert int(second["resourceVersion"]) >= compacted

    def test_where_the_servers_memory_lags_behind_the_pods_are_listed_from_etcd(self, api):
        api.create_pod("a")
        api.server.cache_version = api.cluster.version - 1
        assert list(api.watch().pods) == ["a"]
        assert ["resourceVersion" in query for query in api.pod_lists()] == [True, False]

    def test_known_pods_are_not_current_between_lost_history_and_next_list(self, api):
        listener = api.watch()
        with api.server.outage():
            listener.wait(lambda: any(trouble for what, trouble in listener.troubles if what == "pods"))
            api.cluster.compact()
        listener.wait(lambda: listener.lists == 2)
        reported = [trouble for what, trouble in listener.troubles if what == "pods"]
        assert any("too old resource version" in trouble for trouble in reported)
        listener.wait(lambda: [trouble for what, trouble in listener.troubles if what == "pods"][-1] == "")

    def test_outage_is_reported_and_survived(self, api):
        listener = api.watch()
        with api.server.outage():
            listener.wait(lambda: any(trouble for _, trouble in listener.troubles))
            api.create_pod("a")
        listener.wait(lambda: "a" in listener.pods)
        listener.wait(lambda: ("pods", "") in listener.troubles[-4:])

    def test_bookmarks_keep_a_quiet_watch_from_falling_behind(self, api):
        listener = api.watch()
        listener.wait(lambda: api.watched)
        api.create_pod("elsewhere", node="node-2")
        reached = api.cluster.version
        for seconds in (0.5, 1, 2, 4, 8):  # the first is longer than the server's time between bookmarks; a busy machine may need more
            time.sleep(seconds)
            before = len(api.watched)
            api.server.break_watches()
            listener.wait(lambda before=before: len(api.watched) > before)
            if api.watched[-1] >= reached:
                break
        assert api.watched[-1] >= reached, "the watch goes on where the bookmark was, though nothing of this node's changed"
        assert listener.lists == 1

    def test_a_wrong_token_is_trouble_by_name(self, api):
        api.token_file.write_text("wrong")
        api.watcher.start(api.listener)
        api.listener.wait(lambda: any("HTTP 401" in trouble for _, trouble in api.listener.troubles))
        api.token_file.write_text(TOKEN)  # read at every request: kubelet rotates it
        api.listener.wait(lambda: api.listener.lists)


class SlowApi:
    """What a stream asks and how it waits, in a time of its own: each request takes a while. Also the event that ends the stream."""

    def __init__(self, takes: float, *, tries: int, status: int = 200, retry_after: float = 0.0, open_for: float = 0.0) -> None:
        """Args: takes, open_for: seconds for each request, and that each watch stays open. status: of all answers to lists."""
        self.now = 0.0
        self.waits: list[float] = []
        self.listener = Listener()
        self._takes = takes
        self._tries = tries
        self._status = status
        self._retry_after = retry_after
        self._open_for = open_for

    def request(self, method: str, path: str, *, seconds: float = REQUEST_SECONDS) -> bytes:
        self.now += min(self._takes, seconds)
        if self._takes > seconds:
            raise KubeApiError("Read timed out")
        if self._status != 200:
            raise KubeApiError(f"HTTP {self._status}", self._retry_after)
        return b'{"metadata":{"resourceVersion":"5"},"items":[]}'

    @contextmanager
    def stream(self, path: str, silence_seconds: float) -> Iterator[Iterator[bytes]]:
        """Open a watch that is silent for a while and ends."""
        self.request("GET", path, seconds=silence_seconds)
        yield self._silence()

    def _silence(self) -> Iterator[bytes]:
        self.now += self._open_for
        yield from ()

    def is_set(self) -> bool:
        return len(self.waits) == self._tries

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def play(self) -> list[float]:
        """Let the stream try as often as it may; return how long it waited each time."""
        machine = ListWatch("/pods", lambda raw: raw, msgspec.structs.replace(RULES, version_path="/node"))
        deliver, report = partial(kube_watch._deliver, kube_watch._pods(self.listener)), partial(self.listener.api_trouble, "pods")
        # The loop calls only these methods of a connection and an event.
        follow(machine, cast(KubeConnection, self), deliver, report, cast(threading.Event, self), lambda: self.now)
        return self.waits


class TestSlowApi:
    @pytest.mark.parametrize("takes", [0.0, 1.5, 9.0])
    def test_backoff_grows_with_any_refusal_time_of_server(self, takes):
        waits = SlowApi(takes, tries=8, status=503).play()
        assert all(wait >= 0.5 * want for wait, want in zip(waits, (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10), strict=True))
        assert max(waits) <= RULES.last_backoff_seconds

    def test_waits_grow_where_watches_break_off_soon(self):
        assert SlowApi(1.5, tries=6, open_for=1.0).play()[-1] >= 3.2

    def test_a_watch_that_ends_after_a_while_is_opened_again_soon(self):
        assert max(SlowApi(1.5, tries=6, open_for=240.0).play()) <= RULES.first_backoff_seconds

    def test_server_with_retry_after_is_not_called_before_that(self):
        waits = SlowApi(0.0, tries=3, status=429, retry_after=7.0).play()
        assert all(7.0 < wait <= 7.8 for wait in waits)

    def test_an_agent_lists_from_a_server_that_takes_its_time(self):
        api = SlowApi(30.0, tries=1)
        api.play()
        assert api.listener.lists == 1

    def test_when_to_come_again_is_read_from_the_answer(self):
        with overloaded_api() as url, pytest.raises(KubeApiError, match="HTTP 429") as caught:
            kube_connection(Server(url, None, None)).request("GET", "/api/v1/pods")
        assert caught.value.retry_after_seconds == RETRY_AFTER_SECONDS


class TestRequests:
    def test_a_pod_is_evicted_unless_it_is_another_by_now(self, api):
        uid = api.create_pod("a")["metadata"]["uid"]
        with pytest.raises(KubeApiError, match="UID"):
            api.client.evict_pod("default", "a", "another")
        assert "deletionTimestamp" not in api.cluster.get(Kind.POD, "default", "a")["metadata"]
        api.client.evict_pod("default", "a", uid)
        assert "deletionTimestamp" in api.cluster.get(Kind.POD, "default", "a")["metadata"]
        with pytest.raises(KubeApiError, match="not found"):
            api.client.evict_pod("default", "gone", uid)

    def test_capacity_is_patched_into_the_status_and_nothing_else(self, api):
        api.client.publish_capacity(NODE, {contract.RESOURCE_VGPU_MEMORY: 1001, contract.RESOURCE_VGPU_CORES: 200})
        status = api.cluster.get(Kind.NODE, "", NODE)["status"]
        assert status["capacity"] == {"cpu": "8", contract.RESOURCE_VGPU_MEMORY: "1001", contract.RESOURCE_VGPU_CORES: "200"}

    def test_an_unknown_node_is_an_error_with_the_servers_words(self, api):
        with pytest.raises(KubeApiError, match=r"HTTP 404: nodes \"node-9\" not found"):
            api.client.publish_capacity("node-9", {"a/b": 1})

    def test_an_event_is_about_the_pods_container(self, api):
        event = PodEvent("default", "train", "uid-1", "main", contract.EVENT_REASON_REFUSED, "no room" * 500, warning=True)
        api.client.post_event(event, 86_400.0)
        ((event),) = api.cluster.list(Kind.EVENT)[1]
        assert event["involvedObject"] == {
            "apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "train", "uid": "uid-1",
            "fieldPath": "spec.containers{main}",
        }  # fmt: skip
        assert (event["type"], event["reason"], event["source"]["host"]) == ("Warning", contract.EVENT_REASON_REFUSED, NODE)
        assert len(event["message"]) <= 1024
        assert (event["firstTimestamp"], event["lastTimestamp"]) == ("1970-01-02T00:00:00Z", "1970-01-02T00:00:00Z")

    def test_event_with_lost_reply_exists_once(self, api):
        event = PodEvent("default", "x" * 253, "uid-1", "main", contract.EVENT_REASON_REFUSED, "no room", warning=True)
        for happened_at in (86_400.0, 86_400.0, 86_700.0):
            api.client.post_event(event, happened_at)
        names = [one["metadata"]["name"] for one in api.cluster.list(Kind.EVENT)[1]]
        assert len(names) == 2
        assert all(len(name) <= 253 for name in names)

    @pytest.mark.parametrize(
        ("status", "error"),
        [
            pytest.param(403, KubeRefusedError, id="not allowed"),
            pytest.param(422, KubeRefusedError, id="not well formed"),
            pytest.param(404, KubeNotFoundError, id="no such namespace"),
            pytest.param(429, KubeApiError, id="too many requests"),
            pytest.param(500, KubeApiError, id="a failure of the server"),
        ],
    )
    def test_an_answer_says_whether_to_ask_again(self, status, error):
        with overloaded_api(status) as url, pytest.raises(KubeApiError, match=f"HTTP {status}") as caught:
            kube_connection(Server(url, None, None)).request("GET", "/api/v1/pods")
        assert type(caught.value) is error

    def test_an_unreachable_server_is_an_error_in_a_few_words(self, tmp_path):
        client = KubeApiClient(kube_connection(Server("http://127.0.0.1:1", None, None)), NODE, FakeClock())
        with pytest.raises(KubeApiError, match="refused") as caught:
            client.publish_capacity(NODE, {"a/b": 1})
        assert "object at 0x" not in str(caught.value)

    def test_a_missing_token_is_named(self, tmp_path):
        client = KubeApiClient(kube_connection(Server("http://127.0.0.1:1", tmp_path / "none", None)), NODE, FakeClock())
        with pytest.raises(KubeApiError, match="none: No such file"):
            client.publish_capacity(NODE, {"a/b": 1})
