# SPDX-License-Identifier: Apache-2.0
"""A body with names that are cut off unread means what a JSON decoder makes of the whole."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugin.errors import WireError
from scheduler_plugin.extender import wire

TEXT = st.text(st.sampled_from('ab]}[{",:\\ é'), max_size=8) | st.sampled_from(['"NodeNames":["x"]', ',"NodeNames":[', "]}"])
VALUES = st.recursive(
    st.none() | st.integers(0, 9) | TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
MEMBERS = {
    "Pod": st.dictionaries(TEXT | st.just("NodeNames"), VALUES, max_size=3),
    "Nodes": st.none() | st.just({"items": []}),
    "NodeNames": st.none() | st.lists(TEXT, max_size=3),
    "Other": VALUES,
}


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Draw a body with its keys in any order, some of them in another case, a second time or absent, and any spacing."""
    keys = draw(st.permutations(list(MEMBERS)).map(lambda keys: keys[: draw(st.integers(2, 4))]) | st.just(["Pod", "Nodes", "NodeNames"]))
    members = [(draw(st.sampled_from([key, key, key, key.lower()])), draw(MEMBERS[key])) for key in keys]
    separators = draw(st.sampled_from([(",", ":"), (",", ":"), (", ", ": ")]))
    body = "{" + separators[0].join(f"{json.dumps(key)}{separators[1]}{json.dumps(value, separators=separators)}" for key, value in members)
    return (body + "}").encode()


def meaning(body: bytes, read) -> object:
    try:
        args = read(body)
        return json.loads(bytes(args.pod)), args.nodes, wire.decode_names(args.node_names)
    except WireError:
        return None


@given(bodies(), st.sampled_from([b"", b"", b"}", b"]}", b" ", b"\n"]))
def test_body_has_same_meaning_with_or_without_truncated_names(body, rest):
    whole = meaning(body + rest, lambda body: wire.decode(body, wire.ExtenderArgs))
    assert meaning(body + rest, wire.decode_args) == whole


@pytest.mark.parametrize(
    "body",
    [
        b'{"Pod":{},"NodeNames":["a"],"NodeNames":["b"]}',
        b'{"Pod":{},"NodeNames":["a"],"Other":["b"]}',
        b'{"Pod":{"NodeNames":["x"],"NodeNames":["y"]},"Nodes":null,"NodeNames":["a"]}',
        b'{"Pod":{"a":",\\"NodeNames\\":["},"NodeNames":["]}"]}',
        b'{"Pod":{"a":[1]}}',
    ],
)
def test_bodies_that_could_mislead_are_read_as_a_whole(body):
    assert meaning(body, wire.decode_args) == meaning(body, lambda body: wire.decode(body, wire.ExtenderArgs)) is not None


NAMES = {"Pod": {}, "Nodes": None, "NodeNames": ["a", "b"]}
FULL = {"Pod": {}, "Nodes": {"metadata": {}, "items": [{"kind": "Node"}], "kind": "NodeList", "apiVersion": "v1"}, "NodeNames": None}
META = {"Pod": {}, "NodeNameToVictims": None, "NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "u"}], "NumPDBViolations": 2}, "b": None}}
VICTIMS = {"Pod": {}, "NodeNameToVictims": {"a": {"Pods": [{"metadata": {"uid": "u"}}], "NumPDBViolations": 1}, "b": {"Pods": None}}}
BINDING = {"PodName": "p", "PodNamespace": "n", "PodUID": "u", "Node": "a"}
PROTOCOL = {*FULL, *META, *BINDING, "items", "Pods", "UID", "NumPDBViolations"}


def respellings(value: Any) -> Iterator[Any]:
    """Spell each key of the protocol otherwise by itself, then add a key next to each that the protocol may have one day."""
    for place in range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ():
        for inner in respellings(value[place]):
            copy = value.copy()
            copy[place] = inner
            yield copy
        if place in PROTOCOL:
            for spelling in (place.lower(), place.upper(), place[0].swapcase() + place[1:]):
                yield {spelling if key == place else key: inner for key, inner in value.items()}
            yield value | {"Later": {"items": 7}}


@pytest.mark.parametrize(
    ("body", "form"),
    [
        (NAMES, wire.ExtenderArgs),
        (FULL, wire.ExtenderArgs),
        (META, wire.PreemptionArgs),
        (VICTIMS, wire.PreemptionArgs),
        (BINDING, wire.BindingArgs),
    ],
    ids=["names", "full nodes", "victims by UID", "full victims", "binding"],
)
def test_keys_mean_the_same_in_any_case_the_inner_ones_too(body, form):
    def meaning(body: object) -> object:
        text = json.dumps(body, separators=(",", ":")).encode()
        args = wire.decode_args(text) if form is wire.ExtenderArgs else wire.decode(text, form)
        if isinstance(args, wire.CallArgs) and args.nodes is not None:
            args = args._replace(nodes=wire.FullNodes(args.nodes.items))
        return args

    exact = meaning(body)
    for other in respellings(body):
        assert meaning(other) == exact, other


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"Pod":{},"nodeNames":["a"]}', ["a"]),
        (b'{"Pod":{},"NodeNames":["a"],"nodenames":["b"]}', ["b"]),
        (b'{"nodenames":["b"],"Pod":{},"NodeNames":["a"]}', ["a"]),
    ],
)
def test_of_a_key_in_several_cases_the_last_counts(body, names):
    assert wire.decode_names(wire.decode_args(body).node_names) == names


@pytest.mark.parametrize(
    "body", [b'{"Pod":{},"NodeNames":["a""b"]}', b'{"Pod":{},"NodeNames":[a]}', b'{"Pod":{,"NodeNames":["a"]}', b',"NodeNames":["a"]}']
)
def test_a_broken_body_is_refused_at_the_latest_with_its_names(body):
    with pytest.raises((WireError, msgspec.MsgspecError)):
        wire.decode_names(wire.decode_args(body).node_names)
