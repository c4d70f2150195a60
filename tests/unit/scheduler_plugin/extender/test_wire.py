"""A body whose names are cut off unread means what a JSON decoder makes of the whole."""

import json

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
def test_a_body_means_the_same_whether_its_names_are_cut_off_or_not(body, rest):
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


@pytest.mark.parametrize(
    "body", [b'{"Pod":{},"NodeNames":["a""b"]}', b'{"Pod":{},"NodeNames":[a]}', b'{"Pod":{,"NodeNames":["a"]}', b',"NodeNames":["a"]}']
)
def test_a_broken_body_is_refused_at_the_latest_with_its_names(body):
    with pytest.raises((WireError, msgspec.MsgspecError)):
        wire.decode_names(wire.decode_args(body).node_names)
