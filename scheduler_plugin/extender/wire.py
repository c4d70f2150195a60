"""The extender protocol's JSON, exactly as kube-scheduler writes and reads it (k8s.io/kube-scheduler/extender/v1, no field tags).

Keys are Go's field names with capitals, and absent values are ``null``; the pods and nodes inside are ordinary API objects. We write the
exact case and read any, as Go does: a body with a key that is not exact, or not known, is read a second time. Bodies are hostile: whatever
is wrong surfaces as a WireError before anything is changed.

So a form with keys that may be absent forbids unknown ones: a key in another case is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from proto.errors import AliquotError, quote
from scheduler_plugin.core.objects import NodeObject, PodObject, pod_facts
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.errors import WireError

MAX_NODES: Final = 100_000
_LAST_KEY: Final = b',"NodeNames":['


class NodeList(msgspec.Struct, forbid_unknown_fields=True):
    """Full nodes, sent when the scheduler does not trust us with names, and by an autoscaler that asks about nodes that do not exist."""

    items: list[msgspec.Raw] | None = None
    metadata: msgspec.Raw = msgspec.Raw()
    kind: msgspec.Raw = msgspec.Raw()
    api_version: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="apiVersion")


class ExtenderArgs(msgspec.Struct, rename="pascal", forbid_unknown_fields=True):
    """What filter and prioritize are asked."""

    pod: msgspec.Raw
    nodes: NodeList | None = None
    node_names: msgspec.Raw = msgspec.Raw(b"null")
    """A list of names, or null."""


class Question(NamedTuple):
    """The same, with the text of the names: thousands of them, and prioritize's is usually the very text that filter answered."""

    pod: msgspec.Raw
    nodes: NodeList | None
    node_names: bytes


class Victims(msgspec.Struct, rename="pascal", forbid_unknown_fields=True):
    """Full pods that kube-scheduler would end on a node."""

    pods: list[PodObject] | None = None
    num_pdb_violations: int = msgspec.field(default=0, name="NumPDBViolations")


class MetaPod(msgspec.Struct):
    """A pod by its UID."""

    uid: str = msgspec.field(name="UID")


class MetaVictims(msgspec.Struct, rename="pascal", forbid_unknown_fields=True):
    """The same by UID: what is always answered."""

    pods: list[MetaPod] | None = None
    num_pdb_violations: int = msgspec.field(default=0, name="NumPDBViolations")


class PreemptionArgs(msgspec.Struct, rename="pascal", forbid_unknown_fields=True):
    """What preempt is asked."""

    pod: msgspec.Raw
    node_name_to_victims: dict[str, Victims | None] | None = None
    node_name_to_meta_victims: dict[str, MetaVictims | None] | None = None
    """Of a node a null, a pointer to nothing in Go, is nobody."""


class BindingArgs(msgspec.Struct, rename="pascal"):
    """What bind is asked."""

    pod_name: str
    pod_namespace: str
    pod_uid: str = msgspec.field(name="PodUID")
    node: str


_Args = TypeVar("_Args", ExtenderArgs, PreemptionArgs, BindingArgs)


@dataclass(frozen=True, slots=True)
class _Each:
    """A map from any key to values of a form."""

    form: "_Form"


_Form = Mapping[str, "_Form"] | Sequence["_Form"] | _Each | None
"""An object by its exact keys, a list of one form, a map, or what has no keys of the protocol."""
_VICTIMS: Final[_Form] = {"Pods": None, "NumPDBViolations": None}
_META_VICTIMS: Final[_Form] = {"Pods": [{"UID": None}], "NumPDBViolations": None}
_FORMS: Final[Mapping[type[msgspec.Struct], _Form]] = {
    ExtenderArgs: {"Pod": None, "Nodes": {"items": None}, "NodeNames": None},
    PreemptionArgs: {"Pod": None, "NodeNameToVictims": _Each(_VICTIMS), "NodeNameToMetaVictims": _Each(_META_VICTIMS)},
    BindingArgs: dict.fromkeys(("PodName", "PodNamespace", "PodUID", "Node")),
}


def decode(body: bytes, form: type[_Args]) -> _Args:
    """Read a request's body. Raises WireError."""
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.ValidationError:
        try:
            return msgspec.json.decode(msgspec.json.encode(_in_exact_case(msgspec.Raw(body), _FORMS[form])), type=form)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
            raise WireError(f"expected {form.__name__} of the extender protocol: {exc}") from exc
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise WireError(f"expected {form.__name__} of the extender protocol in JSON: {exc}") from exc


def decode_args(body: bytes) -> Question:
    """Read the body of filter or prioritize. Raises WireError, or leaves it to whoever reads the names when those are wrong.

    kube-scheduler writes the names last, and reading past thousands of them costs more than the rest. They are cut off unread where what
    is before them is a whole object by itself and the first closing bracket after them is the last: of a valid body, then, this is the
    value of the key.
    """
    at = body.find(_LAST_KEY)
    first = at + len(_LAST_KEY) - 1
    if at > 0 and body.endswith(b"]}") and body.find(b"]", first) == len(body) - 2:
        try:
            args = msgspec.json.decode(body[:at] + b"}", type=ExtenderArgs)
            return Question(args.pod, args.nodes, body[first:-1])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            pass  # the names may be what makes it whole
    args = decode(body, ExtenderArgs)
    return Question(args.pod, args.nodes, bytes(args.node_names))


def decode_pod(raw: msgspec.Raw) -> PodFacts:
    """Read the pod of a request. Raises WireError."""
    try:
        pod = pod_facts(msgspec.json.decode(raw, type=PodObject))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, AliquotError) as exc:
        raise WireError(f"expected a pod in Pod: {exc}") from exc
    if not pod.uid:
        raise WireError("expected a pod with metadata.uid in Pod, found none")
    return pod


def decode_names(text: bytes) -> list[str] | None:
    """Read the names of nodes. Raises WireError."""
    try:
        return msgspec.json.decode(text, type=list[str] | None)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise WireError(f"expected a list of names in NodeNames: {exc}") from exc


def decode_node(raw: msgspec.Raw) -> NodeObject:
    """Read one full node. Raises WireError."""
    try:
        bytes(raw).decode()  # all of it, because it is answered as it came, and what is skipped is not looked at
        node = msgspec.json.decode(raw, type=NodeObject)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise WireError(f"expected a node in Nodes: {exc}") from exc
    if not node.metadata.name:
        raise WireError("expected nodes with metadata.name in Nodes")
    return node


def _in_exact_case(raw: msgspec.Raw, form: _Form) -> Any:
    """Spell the protocol's keys as kube-scheduler does, and leave out what is none; of a key that is there twice, the last counts.

    Raises: MsgspecError, UnicodeDecodeError.
    """
    if form is None:
        return raw
    if isinstance(form, Sequence):
        items = msgspec.json.decode(raw, type=list[msgspec.Raw] | None)
        return None if items is None else [_in_exact_case(item, form[0]) for item in items]
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | None)
    if fields is None:
        return None
    if isinstance(form, _Each):
        return {key: _in_exact_case(value, form.form) for key, value in fields.items()}
    exact = {key.casefold(): key for key in form}
    known = ((exact.get(key.casefold()), value) for key, value in fields.items())
    return {key: _in_exact_case(value, form[key]) for key, value in known if key is not None}


def filter_result(
    *,
    node_names: list[str] | msgspec.Raw | None = None,
    nodes: list[msgspec.Raw] | None = None,
    failed: Mapping[str, str] | None = None,
    unresolvable: Mapping[str, str] | None = None,
) -> bytes:
    """Write filter's answer."""
    answer: dict[str, Any] = {
        "Nodes": None if nodes is None else {"metadata": {}, "items": nodes},
        "NodeNames": node_names,
        "FailedNodes": failed or {},
        "FailedAndUnresolvableNodes": unresolvable or {},
        "Error": "",
    }
    return msgspec.json.encode(answer)


def filter_failure(error: str) -> bytes:
    """Write filter's answer when no node could be judged."""
    return msgspec.json.encode({"Error": error})


def bind_result(error: str = "") -> bytes:
    """Write bind's answer; an empty error is success."""
    return msgspec.json.encode({"Error": error})


def preempt_result(victims: Mapping[str, MetaVictims]) -> bytes:
    """Write preempt's answer, always by UID."""
    return msgspec.json.encode({"NodeNameToMetaVictims": victims})


def entry(name: str, score: int) -> bytes:
    """Write one node's entry in prioritize's answer."""
    return b'{"Host":%s,"Score":%d}' % (msgspec.json.encode(name), score)


def check_count(count: int) -> None:
    """Refuse requests about more nodes than any cluster has. Raises WireError."""
    if count > MAX_NODES:
        raise WireError(f"expected at most {MAX_NODES} nodes, found {quote(str(count))}")
