# SPDX-License-Identifier: Apache-2.0
"""Makes the ResourceClaimTemplates that admitted pods name, and deletes those that no pod has used for a day.

A template is made before its pod is admitted, because the claims are made from it as soon as the pod exists. Its name is the hash of its
content, so two replicas can make it at the same time. Each use is noted in the template, to the hour. So a template that a pod is being
admitted with is never near its end, and the deletion needs no look at pods that do not exist yet.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from scheduler_plugin.core.claims.templates import ClaimTemplate, has_content, is_due, is_old, is_ours
from scheduler_plugin.ports import Clock, TemplateApi, TemplateRecord

logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 1800.0
KNOWN_SECONDS: Final = 5.0
"""How long a template that was just seen is not read again: a Deployment makes many pods of one shape at once."""
TRIES: Final = 3


class ClaimTemplates:
    """Implements ``webhook.review.ClaimTemplateMaker``; ``run`` deletes what is not used."""

    def __init__(self, api: TemplateApi, clock: Clock, leads: Callable[[], bool]) -> None:
        """Args: leads: whether this replica deletes templates."""
        self._api = api
        self._clock = clock
        self._leads = leads
        self._seen_at: dict[tuple[str, str], float] = {}
        """By namespace and name; monotonic."""

    async def ensure(self, namespace: str, templates: Sequence[ClaimTemplate]) -> str:
        """See ``webhook.review.ClaimTemplateMaker``."""
        for template in templates:
            try:
                trouble = await self._ensure(namespace, template)
            except KubeApiError as exc:
                return f"ResourceClaimTemplate {template.name}, from which this pod's claims are made, cannot be made: {exc}. Try again"
            if trouble:
                return trouble
        return ""

    async def _ensure(self, namespace: str, template: ClaimTemplate) -> str:
        """Make one template, or note its use. Raises KubeApiError."""
        now = self._clock.monotonic()
        self._seen_at = {key: moment for key, moment in self._seen_at.items() if now - moment < KNOWN_SECONDS}
        if (namespace, template.name) in self._seen_at:
            return ""
        for attempt in range(TRIES):
            try:
                trouble = await self._settle(namespace, template)
                break
            except (KubeConflictError, KubeNotFoundError):  # made, or deleted, since it was read
                if attempt == TRIES - 1:
                    raise
        if not trouble:
            self._seen_at[namespace, template.name] = now
        return trouble

    async def _settle(self, namespace: str, template: ClaimTemplate) -> str:
        found, now = await self._api.read(namespace, template.name), self._clock.now()
        if found is None:
            await self._api.create(namespace, template, now)
        elif not has_content(found.spec, template.spec):
            return (
                f"ResourceClaimTemplate {namespace}/{template.name} has another content than its name says, so this pod would get other "
                "amounts: delete it, and create the pod again"
            )
        elif is_due(found.last_used, now):
            await self._api.touch(namespace, template.name, now)
        return ""

    async def run(self) -> None:
        """Delete unused templates again and again, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if self._leads():
                await self.sweep()

    async def sweep(self) -> None:
        """Delete the templates that no pod uses."""
        try:
            old = [one for one in await self._api.listed() if is_ours(one.name) and is_old(one.last_used, self._clock.now())]
            for namespace in sorted({one.namespace for one in old}):
                used = await self._api.used(namespace)
                for one in old:
                    if one.namespace == namespace and one.name not in used:
                        await self._delete(one)
        except KubeApiError as exc:
            logger.warning("unused ResourceClaimTemplates not deleted: %s", exc)

    async def _delete(self, one: TemplateRecord) -> None:
        """Delete one, unless a pod was admitted with it meanwhile. Raises KubeApiError."""
        try:
            await self._api.delete(one)
        except (KubeConflictError, KubeNotFoundError):
            return
        logger.info("unused ResourceClaimTemplate deleted", extra={"namespace": one.namespace, "template": one.name})
