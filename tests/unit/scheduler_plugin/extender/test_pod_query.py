# SPDX-License-Identifier: Apache-2.0
"""A pod is decoded once per call text and its GPU request is parsed once per change, for all verbs and services."""

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
import pytest

from aliquot.placement import request as request_module
from scheduler_plugin.core.cluster.journal import Rules
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.extender.cooperative import plan_ahead
from scheduler_plugin.extender.filter import filter_nodes
from scheduler_plugin.extender.preempt import choose_victims
from scheduler_plugin.extender.prioritize import prioritize_nodes
from scheduler_plugin.services.explainer import Explainer
from scheduler_plugin.settings import Answer
from scheduler_plugin.wiring.cluster import decode_pod
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_context, make_node

GANG = {"aliquot.dev/gang": "g", "aliquot.dev/gang-min": "1"}
NAMES = ["n1", "n2"]


class Api:
    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        return None

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        return None


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[object]:
    """Count the calls of a function by its name in a module."""
    calls: list[object] = []
    function: Callable[..., object] = getattr(owner, name)

    def noted(*args):
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(owner, name, noted)
    return calls


@pytest.mark.parametrize("annotations", [{}, GANG], ids=["single", "gang"])
async def test_pod_is_decoded_and_parsed_once_from_filter_to_bind(annotations, monkeypatch):
    state = ClusterState()
    for name in NAMES:
        state.set_gpu_node(make_node(name, 2))
    context = make_context(state)
    pod = pod_object("p", annotations=annotations, vgpu="1", vgpu_memory="300")
    state.set_pod(decode_pod(msgspec.Raw(json.dumps(pod).encode())))
    decoded, parsed = count_calls(monkeypatch, wire, "pod_facts"), count_calls(monkeypatch, request_module, "pod_preferences")

    body = json.dumps({"Pod": pod, "NodeNames": NAMES}).encode()
    args = wire.decode_args(body)
    await plan_ahead(context, args)
    assert json.loads(filter_nodes(context, args, 0.0, Answer.ONE))["NodeNames"]
    prioritize_nodes(context, body)
    while context.prepare():
        pass
    await Explainer(context, Rules(context.verdicts.default_policy, DEFAULT_WEIGHTS), lambda: 0.0).explain(state.pods["uid-p"])
    await choose_victims(context, json.dumps({"Pod": pod, "NodeNameToMetaVictims": {"n1": {"Pods": []}}}).encode())
    call = {"PodName": "p", "PodNamespace": "team", "PodUID": "uid-p", "Node": "n1"}
    assert json.loads(await Binder(context, cast(Any, Api()), lambda: True).bind(json.dumps(call).encode())) == {"Error": ""}

    assert (len(decoded), len(parsed)) == (1, 1)


def test_replica_with_equal_request_is_not_parsed_again(monkeypatch):
    context = make_context(ClusterState())
    parsed = count_calls(monkeypatch, request_module, "pod_preferences")
    for name in ("first", "second"):
        context.calls.pods.read(msgspec.Raw(json.dumps(pod_object(name, vgpu="1")).encode()))
    assert len(parsed) == 1
    pod = decode_pod(msgspec.Raw(json.dumps(pod_object("second", vgpu="1")).encode()))
    context.verdicts.requests.of(pod)
    assert len(parsed) == 1


def test_request_is_parsed_again_when_annotations_change(monkeypatch):
    context = make_context(ClusterState())
    parsed = count_calls(monkeypatch, request_module, "pod_preferences")
    for annotations in ({}, {"aliquot.dev/numa": "strict"}):
        pod = pod_object("p", annotations=annotations, vgpu="1")
        context.verdicts.requests.of(decode_pod(msgspec.Raw(json.dumps(pod).encode())))
    assert len(parsed) == 2
