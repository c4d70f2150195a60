# SPDX-License-Identifier: Apache-2.0
"""The extender protocol's JSON, exactly as kube-scheduler writes and reads it (k8s.io/kube-scheduler/extender/v1, no field tags).

Keys are Go's field names with capitals, and absent values are ``null``. The pods and nodes inside are ordinary API objects. This module
writes the exact case and reads any case, as Go does: a body with an inexact or unknown key is read a second time. For that a form with
optional keys forbids unknown keys, because a key in another case counts as unknown.

Bodies are untrusted: each error becomes a WireError before the state changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from aliquot.contract.errors import AliquotError, quote
from scheduler_plugin.core.cluster.objects import NodeObject, PodObject, pod_facts
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.errors import WireError

MAX_NODES: Final = 100_000
_LAST_KEY: Final = b',"NodeNames":['


class FullNodes(msgspec.Struct, forbid_unknown_fields=True):
    """Full nodes, sent by a scheduler without ``nodeCacheCapable``, and by an autoscaler that invents nodes."""

    items: list[msgspec.Raw] | None = None
    metadata: msgspec.Raw = msgspec.Raw()
    kind: msgspec.Raw = msgspec.Raw()
    api_version: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="apiVersion")


class ExtenderArgs(msgspec.Struct, rename="pascal", forbid_unknown_fields=True):
    """The body of filter and prioritize."""

    pod: msgspec.Raw
    nodes: FullNodes | None = None
    node_names: msgspec.Raw = msgspec.Raw(b"null")
    """A list of names, or null."""


class CallArgs(NamedTuple):
    """The same with the names as text: there are thousands, and prioritize usually gets the very text that filter returned."""

    pod: msgspec.Raw
    nodes: FullNodes | None
    node_names: bytes


class Victims(msgspec.Struct, rename="pascal", forbid_unknown_fields=True):
    """The full pods that kube-scheduler would end on a node."""

    pods: list[PodObject] | None = None
    num_pdb_violations: int = msgspec.field(default=0, name="NumPDBViolations")


class MetaPod(msgspec.Struct):
    """A pod by its UID."""

    uid: str = msgspec.field(name="UID")


class MetaVictims(msgspec.Struct, rename="pascal", forbid_unknown_fields=True):
    """The same by UID. Replies always have this form."""

    pods: list[MetaPod] | None = None
    num_pdb_violations: int = msgspec.field(default=0, name="NumPDBViolations")


class PreemptionArgs(msgspec.Struct, rename="pascal", forbid_unknown_fields=True):
    """The body of preempt."""

    pod: msgspec.Raw
    node_name_to_victims: dict[str, Victims | None] | None = None
    node_name_to_meta_victims: dict[str, MetaVictims | None] | None = None
    """``null`` for a node (a nil pointer in Go) means no victims."""


class BindingArgs(msgspec.Struct, rename="pascal"):
    """The body of bind."""

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
"""An object by its exact keys, a list of one form, a map, or a value without keys of the protocol."""
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


def decode_args(body: bytes) -> CallArgs:
    """Read the body of filter or prioritize. Raises WireError; an error in the names is raised by ``NodeLists.read``.

    kube-scheduler writes the names last, and to parse thousands of them costs more than the rest. They are cut off unread if the text
    before them is a complete object and the first closing bracket after them is the last one: in a valid body this is the value of the
    key.
    """
    at = body.find(_LAST_KEY)
    first = at + len(_LAST_KEY) - 1
    if at > 0 and body.endswith(b"]}") and body.find(b"]", first) == len(body) - 2:
        try:
            args = msgspec.json.decode(body[:at] + b"}", type=ExtenderArgs)
            return CallArgs(args.pod, args.nodes, body[first:-1])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            pass  # the object may be complete only with the names
    args = decode(body, ExtenderArgs)
    return CallArgs(args.pod, args.nodes, bytes(args.node_names))


def decode_pod(raw: msgspec.Raw) -> PodFacts:
    """Read the pod of a request. Raises WireError."""
    try:
        pod = pod_facts(msgspec.json.decode(raw, type=PodObject))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, AliquotError) as exc:
        raise WireError(f"expected a pod in Pod: {exc}") from exc
    if not pod.uid:
        raise WireError("expected a pod with metadata.uid in Pod, found a pod without it")
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
        bytes(raw).decode()  # all of it: the reply repeats the text, and msgspec does not check values that it skips
        node = msgspec.json.decode(raw, type=NodeObject)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise WireError(f"expected a node in Nodes: {exc}") from exc
    if not node.metadata.name:
        raise WireError("expected nodes with metadata.name in Nodes")
    return node


def _in_exact_case(raw: msgspec.Raw, form: _Form) -> Any:
    """Write the protocol's keys in kube-scheduler's case and drop all others. If a key occurs twice, the last one counts.

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
    return {key: _in_exact_case(value, form[key]) for key, value in _renamed(fields, form).items()}


def _renamed(fields: Mapping[str, msgspec.Raw], keys: Iterable[str]) -> dict[str, msgspec.Raw]:
    """Return the fields with these keys, in any case, by the exact keys."""
    exact = {key.casefold(): key for key in keys}
    return {exact[key.casefold()]: value for key, value in fields.items() if key.casefold() in exact}


def filter_result(
    *,
    node_names: list[str] | msgspec.Raw | None = None,
    nodes: list[msgspec.Raw] | None = None,
    failed: Mapping[str, str] | None = None,
    unresolvable: Mapping[str, str] | None = None,
) -> bytes:
    """Write filter's reply."""
    result: dict[str, Any] = {
        "Nodes": None if nodes is None else {"metadata": {}, "items": nodes},
        "NodeNames": node_names,
        "FailedNodes": failed or {},
        "FailedAndUnresolvableNodes": unresolvable or {},
        "Error": "",
    }
    return msgspec.json.encode(result)


def filter_failure(error: str) -> bytes:
    """Write filter's reply if no node could be judged."""
    return msgspec.json.encode({"Error": error})


def bind_result(error: str = "") -> bytes:
    """Write bind's reply; an empty error means success."""
    return msgspec.json.encode({"Error": error})


def preempt_result(victims: Mapping[str, MetaVictims]) -> bytes:
    """Write preempt's reply, always by UID."""
    return msgspec.json.encode({"NodeNameToMetaVictims": victims})


def entry(name: str, score: int) -> bytes:
    """Write one node's entry in prioritize's reply."""
    return b'{"Host":%s,"Score":%d}' % (msgspec.json.encode(name), score)


def check_count(count: int) -> None:
    """Refuse calls with more nodes than any cluster has. Raises WireError."""
    if count > MAX_NODES:
        raise WireError(f"expected at most {MAX_NODES} nodes, found {quote(str(count))}")
