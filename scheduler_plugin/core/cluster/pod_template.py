# SPDX-License-Identifier: Apache-2.0
"""The template of a pod: what pods have in common that probably behave alike.

It is a namespace, a kind of controller and the requests of a pod. Runtimes and the use of GPUs are learned by it.
"""

from typing import Final, TypeAlias

from scheduler_plugin.core.cluster.pods import PodFacts

MAX_TEMPLATES: Final = 4096
"""Most templates of which something is kept."""
Template: TypeAlias = tuple[str, str, int, int, tuple[tuple[str, tuple[tuple[str, str | int], ...]], ...]]


def template_of(pod: PodFacts) -> Template | None:
    """Return the template of a pod; None for a pod without GPUs."""
    if pod.gpu is None:
        return None
    limits = tuple((spec.name, tuple(sorted(spec.limits.items()))) for spec in pod.gpu.containers)
    return pod.namespace, pod.controller_kind, pod.cpu_milli, pod.memory_mib, limits
