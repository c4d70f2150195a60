# SPDX-License-Identifier: Apache-2.0
"""Finds the gang of a pod in other objects while the pod is admitted: in the PodGroup that it names, or in its owners.

Only pods of our scheduler that ask for a GPU are looked at, and only if they state no gang themselves. A PodGroup that the pod names always
counts. Owners count if the pod or its namespace has the label ``aliquot.dev/gang-from-owner: "true"``, or if the settings say so.

A pod is refused if its gang is unknown: members that start one by one could wait for each other for ever. Its controller creates it again.

Pods of one owner come within milliseconds of each other, so an object is read once for all of them (KEPT_SECONDS).
"""

import asyncio
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, TypeVar

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.kube.errors import KubeApiError
from aliquot.kube.requests import namespaced, object_path
from aliquot.placement.request import RequestError
from scheduler_plugin.ports import ObjectApi
from scheduler_plugin.webhook.draft import Draft
from scheduler_plugin.webhook.groups import Finding, named_pod_group
from scheduler_plugin.webhook.normalise import Normaliser
from scheduler_plugin.webhook.owner_groups import Alone, Json, OwnedPod, Reference, group_of, row_of
from scheduler_plugin.webhook.pod_groups import find_pod_group

FIND_SECONDS: Final = 4.0
"""The API server waits 5 s for the webhook (timeoutSeconds)."""
KEPT_SECONDS: Final = 2.0
"""How old an object may be: the size of an owner can change."""
MOST_KEPT: Final = 1024
SKIP: Final = "kai.scheduler/skip-podgrouper"
_T = TypeVar("_T")


class _Asked(Enum):
    """What makes a pod a member of its owner's gang."""

    NOT = auto()
    BY_DEFAULT = auto()
    """The namespace's label, or the settings."""
    BY_POD = auto()


@dataclass(frozen=True, slots=True)
class _Kept:
    """An object that was read, or is being read."""

    until: float
    content: "asyncio.Future[Json | None]"


class Grouper:
    """Reads PodGroups and owners."""

    def __init__(self, normaliser: Normaliser, objects: ObjectApi, monotonic: Callable[[], float], *, for_all: bool) -> None:
        """Args: for_all: whether pods without the label are in the gangs of their owners too."""
        self._normaliser = normaliser
        self._objects = objects
        self._monotonic = monotonic
        self._for_all = for_all
        self._kept: dict[str, _Kept] = {}

    async def find(self, pod: Mapping[str, Any], namespace: str) -> Finding | None:
        """Find the gang of a pod that is being created; None for a pod without one, or with one of its own."""
        try:
            draft = Draft(pod)
            if contract.ANNOTATION_GANG in draft.annotations or not self._normaliser.places(pod):
                return None
            async with asyncio.timeout(FIND_SECONDS):
                return await self._find(draft, namespace)
        except RequestError as exc:
            return Finding(refusal=str(exc))
        except (KubeApiError, TimeoutError) as exc:
            reason = str(exc) or f"no reply within {FIND_SECONDS:.0f} s"
            return Finding(refusal=f"the gang of the pod is unknown, try again: {reason}")

    async def _find(self, draft: Draft, namespace: str) -> Finding | None:
        named = named_pod_group(draft, scheduling_groups=self._normaliser.options.scheduling_groups)
        if named is not None:
            group = await self._run(find_pod_group(*named, draft.labels, draft.annotations), namespace)
            source = f"PodGroup {quote(group.name)}"
            idle = f"{source}: {', '.join(group.idle)} of its spec has no effect here" if group.idle else ""
            return Finding(group.name, group.minimum, group.role, source, group.domain, warning=idle)
        asked = await self._asked(draft, namespace)
        return None if asked is _Asked.NOT else await self._find_in_owners(draft, namespace, asked)

    async def _asked(self, draft: Draft, namespace: str) -> _Asked:
        own = _flag(draft.labels, "pod")
        if own is not None:
            return _Asked.BY_POD if own else _Asked.NOT
        # Without a word of its own, a pod of another kind needs no look at its namespace.
        row = row_of(draft.controller)
        if row is None or row.rule is None or SKIP in draft.annotations:
            return _Asked.NOT
        found = await self._read(object_path("/api/v1/namespaces", namespace))
        of_namespace = _flag(((found or {}).get("metadata") or {}).get("labels") or {}, "namespace")
        return _Asked.BY_DEFAULT if (self._for_all if of_namespace is None else of_namespace) else _Asked.NOT

    async def _find_in_owners(self, draft: Draft, namespace: str, asked: _Asked) -> Finding | None:
        pod = OwnedPod(draft.name, draft.labels, draft.annotations, draft.controller, self._normaliser.places)
        group = await self._run(group_of(pod), namespace)
        if isinstance(group, Alone):
            if asked is not _Asked.BY_POD:
                return None
            if group.is_refused:
                raise RequestError(f"label {contract.LABEL_GANG_FROM_OWNER}: {group.why}, or remove the label")
            return Finding(warning=f"label {contract.LABEL_GANG_FROM_OWNER}: the pod starts by itself: {group.why}")
        if group.only_if_asked and asked is not _Asked.BY_POD:
            return None
        return Finding(group.name, group.minimum, group.role, f"the pod's {draft.controller_kind}")

    # --- reading ---

    async def _run(self, steps: Generator[Reference, Json | None, _T], namespace: str) -> _T:
        """Read what the steps ask for, and return their result."""
        content: Json | None = None
        try:
            reference = next(steps)
            while True:
                content = await self._look_up(reference, namespace)
                reference = steps.send(content)
        except StopIteration as stop:
            result: _T = stop.value
            return result

    async def _look_up(self, reference: Reference, namespace: str) -> Json | None:
        """Return an object; None if there is none with this name and UID."""
        prefix = "apis" if "/" in reference.api_version else "api"
        path = object_path(namespaced(reference.plural, namespace, f"{prefix}/{reference.api_version}"), reference.name)
        content = await self._read(path)
        if content is None or not _is(content, reference):
            self._kept.pop(path, None)  # it may have been created, or recreated, a moment ago
            content = await self._read(path)
        return content if content is not None and _is(content, reference) else None

    async def _read(self, path: str) -> Json | None:
        now = self._monotonic()
        known = self._kept.get(path)
        if known is None or known.until <= now or _has_failed(known.content):
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            known = self._kept[path] = _Kept(now + KEPT_SECONDS, asyncio.ensure_future(self._objects.get_object(path)))
            known.content.add_done_callback(_has_failed)  # or asyncio logs an error that no caller waits for any longer
        # One caller that gives up must not end the read for the others.
        return await asyncio.shield(known.content)


def _has_failed(read: "asyncio.Future[Json | None]") -> bool:
    return read.done() and (read.cancelled() or read.exception() is not None)


def _is(content: Json, reference: Reference) -> bool:
    metadata = content.get("metadata")
    return not reference.uid or (isinstance(metadata, dict) and metadata.get("uid") == reference.uid)


def _flag(labels: Mapping[str, Any], where: str) -> bool | None:
    """Read the label; None without one. Raises RequestError."""
    text = labels.get(contract.LABEL_GANG_FROM_OWNER)
    if text not in (None, "true", "false"):
        raise RequestError(f"label {contract.LABEL_GANG_FROM_OWNER} of the {where}: expected true or false, found {quote(str(text))}")
    return None if text is None else text == "true"
