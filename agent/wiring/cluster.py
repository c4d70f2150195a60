# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API: what the agent watches there, and what it posts."""

from dataclasses import dataclass

from agent.adapters.kube_api import KubeApiClient, kube_connection
from agent.adapters.kube_watch import KubeWatcher
from agent.services.events import EventRecorder
from agent.services.evictor import Evictor
from agent.services.pod_cache import PodCache
from agent.wiring.setup import Setup


@dataclass(frozen=True, slots=True)
class Cluster:
    """The API and what was read from it."""

    pods: PodCache
    watcher: KubeWatcher
    """Feeds ``pods`` once it is started."""
    api: KubeApiClient
    events: EventRecorder
    evictor: Evictor


def build_cluster(setup: Setup) -> Cluster:
    """Build the group; on the event loop."""
    settings, api_server = setup.settings, setup.api_server
    watcher = KubeWatcher(lambda **options: kube_connection(api_server, **options), setup.node_name, gpu_nodes=settings.publish_gpu_node)
    api = KubeApiClient(kube_connection(api_server), setup.node_name, setup.clock)
    return Cluster(PodCache(), watcher, api, EventRecorder(api, setup.clock), Evictor(api, setup.clock))
