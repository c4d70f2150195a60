# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes API over real HTTP for tests of the scheduler: list in pages, watch with bookmarks, bindings, patches, leases and Secrets.

As strict as the real one where it matters here: versions grow, a binding needs the right UID and an unbound pod, writes of a lease need its
version, history can be forgotten (410) and the server can fall silent or answer too late.
"""

import asyncio
import json
import time
from collections import deque
from typing import Any

from aiohttp import web

from aliquot_lab.standin.errors import InvalidError
from aliquot_lab.standin.patches import apply_json_patch, merge_patch

WEBHOOKS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
COLLECTIONS = {
    "pods": "Pod",
    "nodes": "Node",
    "gpunodes": "GpuNode",
    "poddisruptionbudgets": "PodDisruptionBudget",
    "leases": "Lease",
    "secrets": "Secret",
    "workloads": "Workload",
    "admissionchecks": "AdmissionCheck",
    "resourceflavors": "ResourceFlavor",
    "localqueues": "LocalQueue",
    "clusterqueues": "ClusterQueue",
    "priorityclasses": "PriorityClass",
    "workloadpriorityclasses": "WorkloadPriorityClass",
} | dict.fromkeys(WEBHOOKS, "Webhooks")


class FakeApi:
    def __init__(self) -> None:
        self.objects: dict[str, dict[tuple[str, str], dict[str, Any]]] = {name: {} for name in COLLECTIONS}
        self.version = 1
        self.oldest = 0
        self.history: deque[tuple[int, str, str, dict[str, Any]]] = deque()
        self.requests: list[str] = []
        self.owners: dict[str, dict[str, Any]] = {}
        """Namespaces and owners of pods by their path; these are only read one by one."""
        self.bindings: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.silent = False
        self.refused_watches: list[str] = []
        """The collection of each watch that received 410: its version was forgotten."""
        self.held_back: set[str] = set()
        """Collections that are not reported, neither in lists nor in watches."""
        self.missing: set[str] = set()
        """Collections that the server does not have."""
        self.lose_binding_answers = 0
        """How many bindings are carried out without an answer."""
        self.refuse_writes = False
        """Whether writes of Secrets and webhook configurations are forbidden."""
        self.protected: set[tuple[str, str]] = set()
        """Namespace and name of pods that a budget keeps from being evicted."""
        self.bookmark_seconds = 0.1
        self._changed = asyncio.Condition()
        self._epoch = 0
        application = web.Application(middlewares=[self._gate])
        for prefix in ("/api/v1", "/apis/aliquot.dev/v1alpha1", "/apis/policy/v1", "/apis/scheduling.k8s.io/v1", KUEUE):
            application.router.add_get(prefix + "/{plural}", self._collection)
        application.router.add_get("/api/v1/namespaces/{namespace}/{plural:pods}", self._collection)
        pod = "/api/v1/namespaces/{namespace}/pods/{name}"
        application.router.add_get(pod, self._get)
        application.router.add_patch("/api/v1/namespaces/{namespace}/{plural:pods}/{name}", self._patch)
        application.router.add_patch(KUEUE + "/namespaces/{namespace}/{plural:workloads}/{name}", self._patch)
        application.router.add_patch(pod + "/status", self._patch_status)
        application.router.add_post(pod + "/binding", self._bind)
        application.router.add_post(pod + "/eviction", self._evict)
        application.router.add_post("/api/v1/namespaces/{namespace}/events", self._post_event)
        leases = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        application.router.add_post(leases, self._create_lease)
        application.router.add_get(leases + "/{name}", self._get)
        application.router.add_put(leases + "/{name}", self._put_lease)
        application.router.add_patch(KUEUE + "/{plural:admissionchecks}/{name}/status", self._apply_status)
        application.router.add_patch(KUEUE + "/namespaces/{namespace}/{plural:workloads}/{name}/status", self._apply_status)
        self._add_certificates(application.router)
        application.router.add_get("/apis/{group}/{version}/namespaces/{namespace}/{plural}/{name}", self._get_owner)
        application.router.add_get("/api/v1/namespaces/{namespace}", self._get_owner)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        self.url = ""

    async def __aenter__(self) -> "FakeApi":
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.break_watches()
        await self._runner.cleanup()

    # --- what a test does to it ---

    async def put(self, plural: str, item: dict[str, Any]) -> dict[str, Any]:
        item = json.loads(json.dumps(item))
        key = (item["metadata"].get("namespace", ""), item["metadata"]["name"])
        kind = "MODIFIED" if key in self.objects[plural] else "ADDED"
        await self._record(plural, kind, key, item)
        return json.loads(json.dumps(item))

    async def delete(self, plural: str, name: str, namespace: str = "") -> None:
        item = self.objects[plural].pop((namespace, name))
        await self._record(plural, "DELETED", None, item)

    async def forget(self) -> None:
        """End the watches and forget the history they would go on from; in this order, as a bookmark would tell them the new version."""
        await self.break_watches()
        self.history.clear()
        self.version += 1
        self.oldest = self.version

    async def break_watches(self) -> None:
        async with self._changed:
            self._epoch += 1
            self._changed.notify_all()

    def pod(self, name: str, namespace: str = "team") -> dict[str, Any]:
        return self.objects["pods"][namespace, name]

    async def _record(self, plural: str, kind: str, key: tuple[str, str] | None, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        if key is not None:
            self.objects[plural][key] = item
        self.history.append((self.version, plural, kind, json.loads(json.dumps(item))))
        async with self._changed:
            self._changed.notify_all()

    # --- HTTP ---

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path_qs}")
        if self.silent:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=503)
        return await handler(request)

    async def _post_event(self, request: web.Request) -> web.Response:
        event = await request.json()
        if event["metadata"]["namespace"] != event["involvedObject"]["namespace"] or len(event["message"]) > 1024:
            return web.json_response({"message": "invalid event"}, status=422)
        self.events.append(event)
        return web.json_response(event, status=201)

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        plural = request.match_info["plural"]
        if plural in self.held_back:
            return failure(503, "overloaded")
        if plural in self.missing:
            return failure(404, "the server could not find the requested resource")
        if "watch" in request.query:
            return await self._watch(request, plural)
        selector, namespace = request.query.get("fieldSelector", ""), request.match_info.get("namespace")
        items = [
            (key, item) for key, item in sorted(self.objects[plural].items()) if namespace in (None, key[0]) and is_selected(item, selector)
        ]
        start, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "500"))
        more = str(start + limit) if start + limit < len(items) else None
        return web.json_response(
            {"metadata": {"resourceVersion": str(self.version), "continue": more}, "items": [i for _, i in items[start : start + limit]]}
        )

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        selector = request.query.get("fieldSelector", "")
        seen, epoch = int(request.query["resourceVersion"]), self._epoch

        async def send(kind: str, item: dict[str, Any]) -> None:
            await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")

        if seen < self.oldest:
            self.refused_watches.append(plural)
            await send("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
            return response
        while epoch == self._epoch and not self.silent:
            for version, of, kind, item in list(self.history):
                if version > seen and of == plural:
                    if kind != "DELETED" and not is_selected(item, selector):  # the watch reports it as gone, with its last state
                        await send("DELETED", item | {"status": item["status"] | {"phase": "Running"}})
                    else:
                        await send(kind, item)
            seen = self.version
            await send("BOOKMARK", {"kind": COLLECTIONS[plural], "metadata": {"resourceVersion": str(seen)}})

            def is_newer(since: int = seen) -> bool:
                return self.version > since or epoch != self._epoch

            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait_for(is_newer), self.bookmark_seconds)
                except TimeoutError:
                    continue
        return response

    async def _get(self, request: web.Request) -> web.Response:
        plural = "leases" if "leases" in request.path else "pods"
        item = self.objects[plural].get((request.match_info["namespace"], request.match_info["name"]))
        return failure(404, "not found") if item is None else web.json_response(item)

    async def _get_owner(self, request: web.Request) -> web.Response:
        item = self.owners.get(request.path)
        return failure(404, "not found") if item is None else web.json_response(item)

    async def _patch(self, request: web.Request) -> web.Response:
        key = (request.match_info["namespace"], request.match_info["name"])
        plural = request.match_info["plural"]
        item, patch = self.objects[plural].get(key), await request.json()
        if item is None:
            return failure(404, "not found")
        if any(patch["metadata"].get(name, item["metadata"][name]) != item["metadata"][name] for name in ("uid", "resourceVersion")):
            return failure(409, "the UID or the version differs")
        changed = json.loads(json.dumps(item))
        changed["metadata"].setdefault("annotations", {}).update(patch["metadata"]["annotations"])
        await self._record(plural, "MODIFIED", key, changed)
        return web.json_response(changed)

    async def _patch_status(self, request: web.Request) -> web.Response:
        key = (request.match_info["namespace"], request.match_info["name"])
        item, patch = self.objects["pods"].get(key), await request.json()
        if item is None:
            return failure(404, "not found")
        if patch["metadata"]["uid"] != item["metadata"]["uid"]:
            return failure(409, "the UID differs")
        if item["spec"].get("nodeName") and "nominatedNodeName" in patch["status"]:
            return failure(422, "a bound pod takes no nomination")
        changed = {**item, "status": merge_patch(item.get("status", {}), patch["status"])}
        await self._record("pods", "MODIFIED", key, changed)
        return web.json_response(changed)

    async def _apply_status(self, request: web.Request) -> web.Response:
        """Server-side apply to the status of an object of Kueue: entries of a list are merged by type or name."""
        assert request.content_type == "application/apply-patch+yaml"
        assert request.query["fieldManager"]
        plural, key, patch = request.match_info["plural"], _key(request), await request.json()
        item = self.objects[plural].get(key)
        if item is None:
            return failure(404, "not found")
        version = patch["metadata"].get("resourceVersion", item["metadata"]["resourceVersion"])
        if version != item["metadata"]["resourceVersion"]:
            return failure(409, "the object has been modified")
        changed = json.loads(json.dumps(item))
        for field, entries in patch["status"].items():
            known = {entry.get("type", entry.get("name")): entry for entry in changed.setdefault("status", {}).get(field, [])}
            for entry in entries:
                known.setdefault(entry.get("type", entry.get("name")), {}).update(entry)
            changed["status"][field] = list(known.values())
        await self._record(plural, "MODIFIED", key, changed)
        return web.json_response(changed)

    async def _evict(self, request: web.Request) -> web.Response:
        key, eviction = (request.match_info["namespace"], request.match_info["name"]), await request.json()
        item = self.objects["pods"].get(key)
        if item is None:
            return failure(404, "not found")
        if eviction["deleteOptions"]["preconditions"]["uid"] != item["metadata"]["uid"]:
            return failure(409, "Precondition failed: UID in precondition differs")
        if key in self.protected:
            return failure(429, "Cannot evict pod as it would violate the pod's disruption budget.")
        if eviction["deleteOptions"].get("dryRun") == ["All"]:
            return web.json_response({"kind": "Status", "status": "Success"}, status=201)
        ending = json.loads(json.dumps(item))
        ending["metadata"]["deletionTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 30))
        await self._record("pods", "MODIFIED", key, ending)
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    async def _bind(self, request: web.Request) -> web.Response:
        key, binding = (request.match_info["namespace"], request.match_info["name"]), await request.json()
        item = self.objects["pods"].get(key)
        if item is None:
            return failure(404, "not found")
        if item["metadata"]["uid"] != binding["metadata"]["uid"]:
            return failure(409, "Precondition failed: UID in precondition differs")
        if item["spec"].get("nodeName"):
            return failure(409, f"pod is already assigned to node {item['spec']['nodeName']}")
        self.bindings.append(binding)
        bound = json.loads(json.dumps(item))
        bound["spec"]["nodeName"] = binding["target"]["name"]
        bound["metadata"].setdefault("annotations", {}).update(binding["metadata"].get("annotations") or {})
        await self._record("pods", "MODIFIED", key, bound)
        if self.lose_binding_answers:
            self.lose_binding_answers -= 1
            if request.transport is not None:
                request.transport.abort()
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    # --- Secrets and webhook configurations ---

    def _add_certificates(self, router: web.UrlDispatcher) -> None:
        secrets = "/api/v1/namespaces/{namespace}/{plural:secrets}"
        router.add_post(secrets, self._create_secret)
        for path in (secrets + "/{name}", f"/apis/admissionregistration.k8s.io/v1/{{plural:{'|'.join(WEBHOOKS)}}}/{{name}}"):
            router.add_get(path, self._get_any)
            router.add_patch(path, self._patch_any)

    async def _get_any(self, request: web.Request) -> web.Response:
        item = self.objects[request.match_info["plural"]].get(_key(request))
        return failure(404, "not found") if item is None else web.json_response(item)

    async def _create_secret(self, request: web.Request) -> web.Response:
        if self.refuse_writes:
            return failure(403, "you may not")
        item = await request.json()
        key = (request.match_info["namespace"], item["metadata"]["name"])
        if key in self.objects["secrets"]:
            return failure(409, "already exists")
        await self._record("secrets", "ADDED", key, item)
        return web.json_response(item, status=201)

    async def _patch_any(self, request: web.Request) -> web.Response:
        if self.refuse_writes:
            return failure(403, "you may not")
        plural, key, patch = request.match_info["plural"], _key(request), await request.json()
        item = self.objects[plural].get(key)
        if item is None:
            return failure(404, "not found")
        changed = json.loads(json.dumps(item))
        if request.content_type == "application/json-patch+json":
            try:
                apply_json_patch(changed, patch)
            except InvalidError as exc:
                return failure(422, str(exc))
        else:
            wanted = patch["metadata"].get("resourceVersion", item["metadata"]["resourceVersion"])
            if wanted != item["metadata"]["resourceVersion"]:
                return failure(409, "the object has been modified")
            changed = merge_patch(changed, patch)
        await self._record(plural, "MODIFIED", key, changed)
        return web.json_response(changed)

    async def _create_lease(self, request: web.Request) -> web.Response:
        item = await request.json()
        key = (request.match_info["namespace"], item["metadata"]["name"])
        if key in self.objects["leases"]:
            return failure(409, "already exists")
        await self._record("leases", "ADDED", key, item)
        return web.json_response(item, status=201)

    async def _put_lease(self, request: web.Request) -> web.Response:
        item, key = await request.json(), (request.match_info["namespace"], request.match_info["name"])
        if self.objects["leases"][key]["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
            return failure(409, "the object has been modified")
        await self._record("leases", "MODIFIED", key, item)
        return web.json_response(item)


def _key(request: web.Request) -> tuple[str, str]:
    return request.match_info.get("namespace", ""), request.match_info["name"]


def failure(status: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": status, "message": message}, status=status)


def is_selected(item: dict[str, Any], selector: str) -> bool:
    """Whether an object is in a phase that a field selector wants."""
    phase = item.get("status", {}).get("phase", "")
    wanted = [condition.removeprefix("status.phase") for condition in selector.split(",") if condition]
    return all(phase != one[2:] if one.startswith("!=") else phase == one[1:] for one in wanted)


def pod_object(
    name: str = "p1",
    *,
    uid: str | None = None,
    node: str = "",
    annotations: dict[str, str] | None = None,
    controller: str = "",
    **limits: Any,
) -> dict:
    """Write a pod as the API does; limits by the last part of their name. Args: controller: the UID of the Job that made it."""
    full = {f"nvidia.com/{short.replace('_', '-')}": amount for short, amount in limits.items()}
    spec: dict[str, Any] = {
        "containers": [{"name": "main", "image": "cuda", "resources": {"limits": full, "requests": full | {"cpu": "1"}}}]
    }
    if node:
        spec["nodeName"] = node
    metadata: dict[str, Any] = {"name": name, "namespace": "team", "uid": uid or f"uid-{name}", "annotations": annotations or {}}
    if controller:
        metadata["ownerReferences"] = [{"kind": "Note", "uid": "other"}, {"kind": "Job", "uid": controller, "controller": True}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


def node_object(name: str, cpu: str = "64", memory: str = "512Gi") -> dict:
    return {"metadata": {"name": name}, "status": {"allocatable": {"cpu": cpu, "memory": memory}}}
