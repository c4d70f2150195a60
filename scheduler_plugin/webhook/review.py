# SPDX-License-Identifier: Apache-2.0
"""AdmissionReview (admission.k8s.io/v1): reads the API server's review and writes the reply.

``/mutate`` reviews pods that are being created. ``/validate`` reviews them last, after all other webhooks. It refuses a pod that
``/mutate`` would still refuse or change, and an assignment that no binding wrote (``/mutate`` removes one copied from another pod).

The second review is needed because the API server calls mutating webhooks in the order of their configurations' names, and calls again
only those that it called in the first round. If a later webhook adds a GPU to a pod without GPUs, ``/mutate`` never sees it.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from aliquot import contract
from aliquot.contract.errors import quote
from scheduler_plugin.core.claim_templates import ClaimTemplate
from scheduler_plugin.errors import WireError
from scheduler_plugin.webhook.normalise import Normaliser

API_VERSION: Final = "admission.k8s.io/v1"
MAX_WARNING_CHARS: Final = 240
"""Clients cut off longer ones."""


class _Request(msgspec.Struct, rename="camel"):
    uid: str
    operation: str = "CREATE"
    namespace: str = ""
    dry_run: bool | None = None
    object: dict[str, Any] | None = None
    old_object: dict[str, Any] | None = None


class _Review(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    request: _Request


class Templates(Protocol):
    """Makes ResourceClaimTemplates."""

    async def ensure(self, namespace: str, templates: Sequence[ClaimTemplate]) -> str:
        """Make templates that a namespace lacks; return why one cannot be made, or an empty text."""
        ...


class Reviews:
    """Both endpoints."""

    def __init__(self, normaliser: Normaliser, count: Callable[[str], None], templates: Templates | None = None) -> None:
        """Make them.

        Args: count: called with the outcome of each review.
              templates: makes what pods with claims need; None where no amounts become claims.
        """
        self._templates = templates
        self._normaliser = normaliser
        self._required = normaliser.required_rules()
        self._count = count

    async def mutate(self, body: bytes) -> bytes:
        """Reply to a mutating review. Raises WireError."""
        request = _decode(body)
        if request.operation != "CREATE" or request.object is None:
            return self._answer(request.uid, "untouched")
        outcome = self._normaliser.admit(request.object)
        if outcome.refusal:
            return self._answer(request.uid, "refused", refusal=outcome.refusal)
        if outcome.templates and self._templates is not None and not request.dry_run:
            missing = await self._templates.ensure(request.namespace, outcome.templates)
            if missing:
                return self._answer(request.uid, "refused", refusal=missing)
        name = "admitted" if outcome.is_gpu_pod else "untouched"
        return self._answer(request.uid, name, patch=outcome.patch, warnings=outcome.warnings)

    async def validate(self, body: bytes) -> bytes:
        """Reply to a validating review. Raises WireError."""
        request = _decode(body)
        if request.object is None:
            return self._answer(request.uid, "untouched")
        refusal = _reserved(request) or (self._unready(request.object) if request.operation == "CREATE" else "")
        return self._answer(request.uid, "refused" if refusal else "valid", refusal=refusal)

    def _unready(self, pod: Mapping[str, Any]) -> str:
        """Say what ``/mutate`` would still refuse or change; empty if that is not the case.

        Optional changes of ``/mutate`` are not required: during a rollout, a replica of the previous version may have served the call.
        """
        outcome = self._required.admit(pod)
        if outcome.refusal or not outcome.patch or not outcome.is_gpu_pod:
            return outcome.refusal
        places = ", ".join(str(operation["path"]) for operation in outcome.patch)
        return (
            f"another webhook changed the pod's GPU request after Aliquot's webhook, which would still have to set {places}: "
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
    """Refuse an assignment that no binding wrote. A binding is not an update of the pod, so each change here comes from another client."""
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
