"""AdmissionReview (admission.k8s.io/v1): what the API server asks, and our answer in its form.

``/mutate`` is asked about pods being created. ``/validate`` sees them last, after all other webhooks: it refuses pods
that ``/mutate`` would still refuse or change, and an assignment, which only a binding may carry (one that came along with a copy,
``/mutate`` removes). Its second look is needed because the API server calls mutating webhooks in the order of their configurations' names,
and again only those that it called in the first round: what a later one makes of a pod that asked for no GPU before never meets
``/mutate``.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from proto import contract
from proto.errors import quote
from scheduler_plugin.errors import WireError
from scheduler_plugin.webhook.normalise import Normaliser

API_VERSION: Final = "admission.k8s.io/v1"
MAX_WARNING_CHARS: Final = 240
"""Longer ones are cut off by clients."""


class _Request(msgspec.Struct, rename="camel"):
    uid: str
    operation: str = "CREATE"
    object: dict[str, Any] | None = None
    old_object: dict[str, Any] | None = None


class _Review(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    request: _Request


class Reviews:
    """Both endpoints."""

    def __init__(self, normaliser: Normaliser, count: Callable[[str], None]) -> None:
        """Args: count: told the outcome of each review."""
        self._normaliser = normaliser
        self._required = normaliser.of_what_is_required()
        self._count = count

    async def mutate(self, body: bytes) -> bytes:
        """Answer a mutating review. Raises WireError."""
        request = _decode(body)
        if request.operation != "CREATE" or request.object is None:
            return self._answer(request.uid, "untouched")
        outcome = self._normaliser.admit(request.object)
        if outcome.refusal:
            return self._answer(request.uid, "refused", refusal=outcome.refusal)
        name = "admitted" if outcome.concerns_us else "untouched"
        return self._answer(request.uid, name, patch=outcome.patch, warnings=outcome.warnings)

    async def validate(self, body: bytes) -> bytes:
        """Answer a validating review. Raises WireError."""
        request = _decode(body)
        if request.object is None:
            return self._answer(request.uid, "untouched")
        refusal = _reserved(request) or (self._unready(request.object) if request.operation == "CREATE" else "")
        return self._answer(request.uid, "refused" if refusal else "valid", refusal=refusal)

    def _unready(self, pod: Mapping[str, Any]) -> str:
        """Say why a pod is not as ``/mutate`` leaves one, or nothing.

        What ``/mutate`` adds for convenience is not asked for: while the webhook is rolled out, a replica of before may have been called.
        """
        outcome = self._required.admit(pod)
        if outcome.refusal or not outcome.patch or not outcome.concerns_us:
            return outcome.refusal
        places = ", ".join(str(operation["path"]) for operation in outcome.patch)
        return (
            f"the pod asks for a GPU, and another webhook made or changed that after ours, which would still have to set {places}: "
            f"give that webhook's MutatingWebhookConfiguration a name that sorts before {contract.PRODUCT}"
        )

    def _answer(
        self, uid: str, outcome: str, *, refusal: str = "", patch: Sequence[Mapping[str, Any]] = (), warnings: Sequence[str] = ()
    ) -> bytes:
        self._count(outcome)
        response: dict[str, Any] = {"uid": uid, "allowed": not refusal}
        if refusal:
            response["status"] = {"code": 403, "reason": "Forbidden", "message": refusal}
        if patch:
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(msgspec.json.encode(patch)).decode()}
        if warnings:
            response["warnings"] = [warning[:MAX_WARNING_CHARS] for warning in warnings]
        return msgspec.json.encode({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})


def _decode(body: bytes) -> _Request:
    try:
        review = msgspec.json.decode(body, type=_Review)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise WireError(f"expected an AdmissionReview: {exc}") from exc
    if (review.api_version, review.kind) != (API_VERSION, "AdmissionReview"):
        raise WireError(f"expected an AdmissionReview of {API_VERSION}, found {quote(review.kind)} of {quote(review.api_version)}")
    return review.request


def _reserved(request: _Request) -> str:
    """Refuse an assignment that does not come from a binding; bindings are no updates of a pod, so every change is somebody else's."""
    old = _assignment(request.old_object)
    if _assignment(request.object) == old:
        return ""
    return f"annotation {contract.ANNOTATION_ASSIGNMENT} is reserved: the scheduler writes it when it binds the pod; leave it " + (
        "out" if request.operation == "CREATE" else "as it is"
    )


def _assignment(pod: Mapping[str, Any] | None) -> object:
    metadata = (pod or {}).get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, dict) else None
    return annotations.get(contract.ANNOTATION_ASSIGNMENT) if isinstance(annotations, dict) else None
