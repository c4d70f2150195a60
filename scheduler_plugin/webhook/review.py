# SPDX-License-Identifier: Apache-2.0
"""AdmissionReview (admission.k8s.io/v1): reads the API server's review and writes the reply.

``/mutate`` reviews pods that are being created. ``/validate`` reviews them last, after all other webhooks. It refuses a pod that
``/mutate`` would still refuse or change, and an assignment that no binding wrote (``/mutate`` removes one copied from another pod).
``/templates`` reviews objects with pod templates, and refuses none. ``/claims`` reviews pods that are being created and get devices by
ResourceClaims, of their own or by the resource of a DeviceClass: one scheduler allocates all claims for our GPUs.

The second review is needed because the API server calls mutating webhooks in the order of their configurations' names, and calls again
only those that it called in the first round. If a later webhook adds a GPU to a pod without GPUs, ``/mutate`` never sees it.

These serve namespaces that are not adopted (``adoption.py``). ``/mutate/adopt``, ``/validate/adopt`` and ``/templates/adopt`` serve
adopted ones. ``/mutate/dry-run`` changes no pod and refuses none: it warns of what adoption would do, and counts it.
"""

import base64
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import msgspec

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.contract.model import Allocation
from aliquot.placement.request import RequestError
from scheduler_plugin.core.admit.queues import QUEUE_LABEL
from scheduler_plugin.core.claims.templates import ClaimTemplate
from scheduler_plugin.errors import WireError
from scheduler_plugin.webhook.adoption import becomes
from scheduler_plugin.webhook.allocation import AllocationRule
from scheduler_plugin.webhook.claims import hold_for_planning
from scheduler_plugin.webhook.grouper import Grouper
from scheduler_plugin.webhook.groups import Finding
from scheduler_plugin.webhook.normalise import UNTOUCHED, Normaliser, Outcome
from scheduler_plugin.webhook.templates import Templates, labels_of

API_VERSION: Final = "admission.k8s.io/v1"
MAX_WARNING_CHARS: Final = 240
"""Clients cut off longer ones."""


class _Kind(msgspec.Struct, frozen=True):
    group: str = ""
    kind: str = ""


class _Request(msgspec.Struct, rename="camel"):
    uid: str
    kind: _Kind = _Kind()
    operation: str = "CREATE"
    namespace: str = ""
    dry_run: bool | None = None
    object: dict[str, Any] | None = None
    old_object: dict[str, Any] | None = None


class _Review(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    request: _Request


class ClaimTemplateMaker(Protocol):
    """Makes ResourceClaimTemplates."""

    async def ensure(self, namespace: str, templates: Sequence[ClaimTemplate]) -> str:
        """Make templates that a namespace lacks; return why one cannot be made, or an empty text."""
        ...


class Reviews:
    """All endpoints."""

    def __init__(
        self,
        normaliser: Normaliser,
        count: Callable[[str], None],
        count_adoption: Callable[[str, str], None] = lambda _system, _outcome: None,
        grouper: Callable[[Normaliser], Grouper] | None = None,
        claims: ClaimTemplateMaker | None = None,
        allocation: AllocationRule | None = None,
        on_valid: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        """Make them.

        Args:
            count: called with the outcome of each review.
            count_adoption: called with another system and what became of its pod.
            grouper: makes what finds gangs in other objects, under some rules; None if they are not found there.
            claims: makes what pods with claims need; None where no amounts become claims.
            allocation: which pods' amounts become claims; None: all.
            on_valid: called with each new pod as it will be stored, unless it is refused.
        """
        self._on_valid = on_valid
        self._allocation = allocation
        self._claims = claims
        self._adopting = replace(normaliser, adopts=True)
        self._ours = replace(normaliser, adopts=False)
        both = self._adopting, self._ours
        self._groupers = {} if grouper is None else {one.adopts: grouper(one) for one in both}
        # A template has no owner yet, and names a PodGroup that may not exist yet. It keeps amounts: its pods become pods with claims one
        # by one, when the ResourceClaimTemplates can be made.
        self._templates = {one.adopts: Templates(replace(one, defers_gangs=grouper is not None, as_claims=False)) for one in both}
        self._count = count
        self._count_adoption = count_adoption

    def by_path(self) -> Mapping[str, Callable[[bytes], Coroutine[Any, Any, bytes]]]:
        """Return the endpoints by path. Each raises WireError."""
        return {
            "/claims": self.with_claims,
            "/mutate": self.mutate,
            "/mutate/adopt": self.mutate_adopted,
            "/mutate/dry-run": self.dry_run,
            "/templates": self.templates,
            "/templates/adopt": self.templates_adopted,
            "/validate": self.validate,
            "/validate/adopt": self.validate_adopted,
        }

    async def mutate(self, body: bytes) -> bytes:
        """Reply to a mutating review of a pod of a namespace that is not adopted. Raises WireError."""
        return await self._mutate(body, self._ours)

    async def mutate_adopted(self, body: bytes) -> bytes:
        """Reply to a mutating review of a pod of an adopted namespace. Raises WireError."""
        return await self._mutate(body, self._adopting)

    async def with_claims(self, body: bytes) -> bytes:
        """Reply to a mutating review of a pod with claims. Raises WireError."""
        request = _decode(body)
        if request.operation != "CREATE" or request.object is None or self._allocation is None:
            return self._answer(request.uid, "untouched")
        try:
            outcome = await self._settle_claims(request.object, request.namespace, self._allocation)
        except RequestError as exc:
            return self._answer(request.uid, "refused", refusal=str(exc))
        name = "admitted" if outcome.patch else "untouched"
        return self._answer(request.uid, name, patch=outcome.patch, warnings=outcome.warnings)

    async def _settle_claims(self, pod: Mapping[str, Any], namespace: str, allocation: AllocationRule) -> Outcome:
        """Have a pod with claims for our GPUs wait if our scheduler allocates them; else it goes to that scheduler. Raises RequestError."""
        if await allocation.claims_ours(pod, namespace):
            if await allocation.plans_claims(pod, namespace):
                return Outcome(patch=tuple(hold_for_planning(pod)))
        elif not allocation.asks_ours(pod):
            return UNTOUCHED
        return self._ours.send_to_scheduler(pod)

    async def dry_run(self, body: bytes) -> bytes:
        """Say what adoption would make of a pod, and leave it as it is. Raises WireError."""
        request = _decode(body)
        if request.operation != "CREATE" or request.object is None or self._ours.serves(request.object):
            return self._answer(request.uid, "untouched")  # the pods that are ours anyway are reviewed by /mutate
        outcome = _behind(self._adopting, request).admit(request.object, await self._find_gang(self._adopting, request))
        if not outcome.system:
            return self._answer(request.uid, "untouched")
        warnings: tuple[str, ...] = ()
        if outcome.refusal:
            self._count_adoption(outcome.system, "would_refuse")
            warnings = (f"dry run: Aliquot would refuse this pod of {outcome.system}: {outcome.refusal}",)
        elif outcome.is_gpu_pod:
            self._count_adoption(outcome.system, "would_adopt")
            text = becomes(outcome.patch, request.object)
            also = (f"dry run: {warning}" for warning in outcome.warnings)
            warnings = (f"dry run: Aliquot would adopt this pod of {outcome.system} as {text}", *also)
        return self._answer(request.uid, "dry_run", warnings=warnings)

    async def validate(self, body: bytes) -> bytes:
        """Reply to a validating review of a pod of a namespace that is not adopted. Raises WireError."""
        return await self._validate(body, self._ours)

    async def validate_adopted(self, body: bytes) -> bytes:
        """Reply to a validating review of a pod of an adopted namespace. Raises WireError."""
        return await self._validate(body, self._adopting)

    async def templates(self, body: bytes) -> bytes:
        """Reply to a mutating review of an object with pod templates in a namespace that is not adopted. Raises WireError."""
        return self._rewrite(body, self._templates[False])

    async def templates_adopted(self, body: bytes) -> bytes:
        """Reply to a mutating review of an object with pod templates in an adopted namespace. Raises WireError."""
        return self._rewrite(body, self._templates[True])

    def _rewrite(self, body: bytes, templates: Templates) -> bytes:
        request = _decode(body)
        if request.object is None:
            return self._answer(request.uid, "untouched")
        old = request.old_object if request.operation == "UPDATE" else None
        outcome = templates.admit(request.kind.group, request.kind.kind, request.object, old, request.namespace)
        name = "template" if outcome.patch else "untouched"
        return self._answer(request.uid, name, patch=outcome.patch, warnings=outcome.warnings)

    async def _find_gang(self, normaliser: Normaliser, request: _Request) -> Finding | None:
        """Find the gang of a pod in other objects, if that is switched on."""
        grouper = self._groupers.get(normaliser.adopts)
        return None if grouper is None or request.object is None else await grouper.find(request.object, request.namespace)

    async def _rules_for(self, pod: Mapping[str, Any], namespace: str, normaliser: Normaliser) -> Normaliser:
        """Return the rules for a pod, which may not turn its amounts into claims. Raises RequestError."""
        if self._allocation is None or not normaliser.as_claims or not replace(normaliser, as_claims=False).admit(pod).is_gpu_pod:
            return normaliser
        allocation = await self._allocation.of(pod, namespace)
        return replace(normaliser, as_claims=allocation.by_claims, plans_claims=allocation is Allocation.PLANNED)

    async def _admit(self, pod: Mapping[str, Any], request: _Request, normaliser: Normaliser) -> Outcome:
        try:
            rules = await self._rules_for(pod, request.namespace, normaliser)
        except RequestError as exc:
            return Outcome(refusal=str(exc))
        return _behind(rules, request).admit(pod, await self._find_gang(normaliser, request))

    async def _mutate(self, body: bytes, normaliser: Normaliser) -> bytes:
        request = _decode(body)
        if request.operation != "CREATE" or request.object is None:
            return self._answer(request.uid, "untouched")
        outcome = await self._admit(request.object, request, normaliser)
        if outcome.templates and self._claims is not None and not request.dry_run:
            outcome = replace(outcome, refusal=await self._claims.ensure(request.namespace, outcome.templates))
        name = _name_of(outcome)
        if outcome.system:
            self._count_adoption(outcome.system, {"admitted": "adopted", "refused": "refused"}.get(name, "left"))
        patch = () if outcome.refusal else outcome.patch
        return self._answer(request.uid, name, refusal=outcome.refusal, patch=patch, warnings=outcome.warnings)

    async def _validate(self, body: bytes, normaliser: Normaliser) -> bytes:
        request = _decode(body)
        if request.object is None:
            return self._answer(request.uid, "untouched")
        refusal = _reserved(request)
        if not refusal and request.operation == "CREATE":
            try:
                refusal = _unready(await self._rules_for(request.object, request.namespace, normaliser), request.object)
            except RequestError as exc:
                refusal = str(exc)
            if not refusal:
                self._on_valid(request.object)
        return self._answer(request.uid, "refused" if refusal else "valid", refusal=refusal)

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


def _behind(rules: Normaliser, request: _Request) -> Normaliser:
    """Return the rules for a pod that its spec and its own queue keep to some nodes."""
    pod = request.object or {}
    return rules.behind(pod.get("spec") or {}, request.namespace, str(labels_of(pod).get(QUEUE_LABEL) or ""))


def _name_of(outcome: Outcome) -> str:
    if outcome.refusal:
        return "refused"
    return "admitted" if outcome.is_gpu_pod else "untouched"


def _unready(normaliser: Normaliser, pod: Mapping[str, Any]) -> str:
    """Say what ``/mutate`` would still refuse or change; empty if that is not the case.

    Optional changes of ``/mutate`` are not required: during a rollout, a replica of the previous version may have served the call.
    """
    outcome = normaliser.required_rules().admit(pod)
    if outcome.refusal or not outcome.patch or not outcome.is_gpu_pod:
        return outcome.refusal
    places = ", ".join(str(operation["path"]) for operation in outcome.patch)
    return (
        f"another webhook changed the pod's GPU request after Aliquot's webhook, which would still have to set {places}: "
        f"give that webhook's MutatingWebhookConfiguration a name that sorts before {contract.PRODUCT}"
    )


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
