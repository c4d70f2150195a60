# SPDX-License-Identifier: Apache-2.0
"""The streams of slices, classes and claims, and refused pods that are tried again."""

import asyncio
import json
from collections.abc import Callable, Mapping

import msgspec
import pytest

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeNotFoundError
from scheduler_plugin.core.claims.stored import decode_claim
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.services.claim_watch import FAILED_SECONDS, SHOWN_SECONDS, ClaimRetry, ClaimWatch, decode_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node
from tests.unit.scheduler_plugin.claim_builders import asking, claim_of, class_of, pod_json, pod_of, result, slice_of


class Pods:
    """Implements ``ports.Annotator``."""

    def __init__(self) -> None:
        self.annotated: list[str] = []
        self.fails: KubeApiError | None = None

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        assert (namespace, list(annotations)) == ("team", [contract.ANNOTATION_RETRY])
        if self.fails is not None:
            raise self.fails
        self.annotated.append(uid)


def watched(*more: str, monotonic: Callable[[], float] = lambda: 0.0) -> tuple[ExtenderContext, ClaimWatch]:
    state = ClusterState()
    nodes = [make_node(name, 1) for name in ("n1", *more)]
    state.replace_gpu_nodes(nodes)
    context = make_context(state, monotonic=monotonic)
    watch = ClaimWatch(context.claims)
    watch.slices.listed([slice_of(node) for node in nodes])
    watch.classes.listed([class_of()])
    watch.claims.listed([])
    return context, watch


def refused(context: ExtenderContext, name: str) -> bool:
    body = json.dumps({"Pod": pod_json(name, name), "NodeNames": ["n1"]}).encode()
    return not json.loads(filter_body(context, body, 0.0))["NodeNames"]


def held(name: str = "old", memory: str = "900Mi"):
    return claim_of(name, asking(memory=memory), results=[result("n1", 0, memory=memory)])


def with_refused_pod(*more: str, monotonic: Callable[[], float] = lambda: 0.0) -> tuple[ExtenderContext, ClaimWatch, Pods, ClaimRetry]:
    """A pod that was refused on n1, because an older claim has its GPU."""
    context, watch = watched(*more, monotonic=monotonic)
    pods = Pods()
    context.state.set_pod(pod_of("new", "new"))
    watch.claims.changed(held())
    watch.claims.changed(claim_of("new", asking(memory="500Mi")))
    assert refused(context, "new")
    return context, watch, pods, ClaimRetry(context, pods, lambda: True)


def test_claims_are_judged_once_all_three_kinds_are_listed():
    context = make_context(ClusterState())
    watch = ClaimWatch(context.claims)
    for receiver in (watch.slices, watch.classes, watch.claims):
        assert not context.claims.is_current
        receiver.listed([])
    assert context.claims.is_current


@pytest.mark.parametrize("kind", ["slices", "classes", "claims"])
@pytest.mark.parametrize("again", ["opened", "listed"])
def test_pod_is_left_to_kube_scheduler_while_a_stream_is_broken(kind: str, again: str):
    context, watch = watched()
    receiver = getattr(watch, kind)
    watch.claims.changed(held())
    watch.claims.changed(mine := claim_of("new", asking(memory="500Mi")))
    assert refused(context, "new")
    receiver.trouble("the API server does not answer")
    assert not refused(context, "new")
    lists = {"slices": [slice_of(make_node("n1", 1))], "classes": [class_of()], "claims": [held(), mine]}
    receiver.opened() if again == "opened" else receiver.listed(lists[kind])
    assert refused(context, "new")


@pytest.mark.parametrize("way", ["deleted", "freed", "not in the list"])
def test_refused_pod_is_tried_again_when_claim_is_free(way: str):
    context, watch, pods, retry = with_refused_pod()
    asyncio.run(retry.step())
    assert pods.annotated == []
    match way:
        case "deleted":
            watch.claims.deleted(held())
        case "freed":
            watch.claims.changed(claim_of("old", asking(memory="900Mi")))
        case _:
            watch.claims.listed([claim_of("new", asking(memory="500Mi"))])
    asyncio.run(retry.step())
    asyncio.run(retry.step())
    assert pods.annotated == ["new"]
    assert not refused(context, "new")


def test_room_that_comes_while_another_pod_is_tried_again_is_not_missed():
    context, watch = watched()

    class SlowPods(Pods):
        async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
            watch.claims.deleted(held())
            await super().annotate(namespace, name, uid, annotations)

    pods = SlowPods()
    retry = ClaimRetry(context, pods, lambda: True)
    watch.claims.changed(held())
    for name, memory in (("large", "500Mi"), ("small", "300Mi")):
        context.state.set_pod(pod_of(name, name))
        watch.claims.changed(claim_of(name, asking(memory=memory)))
        assert refused(context, name)
    watch.claims.changed(held(memory="600Mi"))
    asyncio.run(retry.step())
    assert pods.annotated == ["small"]
    asyncio.run(retry.step())
    assert pods.annotated == ["small", "large"]


def test_pod_is_not_tried_again_for_nodes_that_were_not_offered():
    _, watch, pods, retry = with_refused_pod("n2")  # n2, where it would fit, was not offered
    asyncio.run(retry.step())
    assert pods.annotated == []
    watch.claims.deleted(held())
    asyncio.run(retry.step())
    assert pods.annotated == ["new"]


def test_pod_that_the_watch_shows_late_is_tried_again():
    context, watch = watched()
    pods = Pods()
    retry = ClaimRetry(context, pods, lambda: True)
    watch.claims.changed(held())
    watch.claims.changed(claim_of("new", asking(memory="500Mi")))
    assert refused(context, "new")
    asyncio.run(retry.step())
    context.state.set_pod(pod_of("new", "new"))
    watch.claims.deleted(held())
    asyncio.run(retry.step())
    assert pods.annotated == ["new"]


def test_only_the_leader_has_pods_tried_again_and_gone_pods_are_forgotten():
    clock = [0.0]
    context, watch = watched(monotonic=lambda: clock[0])
    pods, leads = Pods(), [False]
    retry = ClaimRetry(context, pods, lambda: leads[0])
    for name in ("waits", "gone"):
        watch.claims.changed(claim_of(name, asking(memory="500Mi")))
    watch.claims.changed(held())
    context.state.set_pod(pod_of("waits", "waits"))
    assert refused(context, "waits")
    assert refused(context, "gone")
    watch.claims.deleted(held())
    asyncio.run(retry.step())
    assert pods.annotated == []
    leads[0], clock[0] = True, SHOWN_SECONDS
    asyncio.run(retry.step())
    assert (pods.annotated, context.claims.refused) == (["waits"], {})


@pytest.mark.parametrize(("trouble", "again"), [(KubeApiError("HTTP 429"), ["new"]), (KubeNotFoundError("no such pod"), [])])
@pytest.mark.parametrize("stream", ["works", "is broken"])
def test_pod_is_tried_again_after_the_api_did_not_take_it(trouble: KubeApiError, again: list[str], stream: str):
    clock = [0.0]
    context, watch, pods, retry = with_refused_pod(monotonic=lambda: clock[0])
    if stream == "is broken":
        watch.slices.trouble("HTTP 429")
    watch.claims.deleted(held())
    pods.fails = trouble
    asyncio.run(retry.step())
    pods.fails = None
    asyncio.run(retry.step())
    assert pods.annotated == [], "not at once"
    clock[0] = FAILED_SECONDS
    asyncio.run(retry.step())
    assert (pods.annotated, context.claims.refused) == (again, {})
    asyncio.run(retry.step())
    assert pods.annotated == again


def test_objects_of_streams_are_decoded():
    one = slice_of(make_node("n1", 1))
    assert decode_object(msgspec.Raw(msgspec.json.encode(one))) == one
    raw = {"metadata": {"name": "c", "namespace": "team", "uid": "u"}, "spec": {"devices": {}}, "status": {}}
    assert decode_claim(msgspec.Raw(msgspec.json.encode(raw))).parts is None
    results = [result("n1", 0), {**result("n1", 1), "adminAccess": True}]
    raw["status"] = {"allocation": {"devices": {"results": results}}, "reservedFor": [{"uid": "p"}]}
    claim = decode_claim(msgspec.Raw(msgspec.json.encode(raw)))
    assert ([part.device[2] for part in claim.parts or ()], claim.reserved_for) == (["gpu-0"], ("p",))


def test_equal_specs_of_claims_are_one_object():
    one, other = claim_of("a", asking(memory="1Mi")), claim_of("b", asking(memory="1Mi"))
    assert (one.spec, one.shape) == (other.spec, other.shape)
    assert one.spec is other.spec
    assert one.shape is other.shape
