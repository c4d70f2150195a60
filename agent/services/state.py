# SPDX-License-Identifier: Apache-2.0
"""What the agent knows, as one group: most services read all three parts."""

from dataclasses import dataclass

from agent.services.driver_watch import DriverWatch
from agent.services.grant_manager import GrantManager
from agent.services.pod_cache import PodCache


@dataclass(frozen=True, slots=True)
class AgentState:
    """The GPUs, the pods of this node, and the grants."""

    watch: DriverWatch
    pods: PodCache
    manager: GrantManager
