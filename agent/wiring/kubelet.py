# SPDX-License-Identifier: Apache-2.0
"""Kubelet's records: which container holds which device IDs."""

from dataclasses import dataclass

from agent.adapters.kubelet_checkpoint import KubeletCheckpointFile
from agent.adapters.pod_resources import KubeletPodResources
from agent.services.admissions import Admissions
from agent.wiring.setup import Setup


@dataclass(frozen=True, slots=True)
class Kubelet:
    """Kubelet as a source of facts; ``agent.wiring.plugins`` has what the agent offers to it."""

    pod_resources: KubeletPodResources
    checkpoint: KubeletCheckpointFile
    admissions: Admissions


def build_kubelet(setup: Setup) -> Kubelet:
    """Build the group."""
    pod_resources = KubeletPodResources(setup.settings.pod_resources_socket)
    checkpoint = KubeletCheckpointFile(setup.settings.device_plugin_dir)
    return Kubelet(pod_resources, checkpoint, Admissions(pod_resources, checkpoint, setup.clock.monotonic))
