# SPDX-License-Identifier: Apache-2.0
"""Why a node cannot take a pod: a dozen fixed sentences, because kube-scheduler counts nodes by equal text.

Explanations have two more, which kube-scheduler itself reports when it calls filter: ``core.fit.kube_filters``.

placement.refusal and the explanation of a decision say what each device lacks. Here, details would split the counts.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from aliquot.placement.fit import Reject


class NodeReason(Enum):
    """Each has one sentence. The numbers index columns; their order has no meaning. FITS is not a reason."""

    FITS = 0
    NO_GPU = 1
    COUNT = 2
    UNAVAILABLE = 3
    UNWANTED = 4
    MIG_MODE = 5
    ISOLATION = 6
    SHARES = 7
    EXCLUSIVE = 8
    MEMORY = 9
    CORES = 10
    MIG_PROFILE = 11
    NUMA = 12
    NOT_CLAIMABLE = 13
    CLAIMS = 14

    @property
    def sentence(self) -> str:
        """The text in the pod's events, which kube-scheduler puts after the number of nodes."""
        return _SENTENCES[self]

    @property
    def label(self) -> str:
        """The value of metric labels."""
        return self.name.lower().replace("_", "-")


_SENTENCES: Final[Mapping[NodeReason, str]] = {
    NodeReason.FITS: "",
    NodeReason.NO_GPU: "no GPU that Aliquot manages",
    NodeReason.COUNT: "fewer GPUs than the pod asks for",
    NodeReason.UNAVAILABLE: "GPUs cordoned or unhealthy",
    NodeReason.UNWANTED: "GPUs excluded by the pod's gpu-type or gpu-uuid",
    NodeReason.MIG_MODE: "GPUs in MIG mode, available as instances only (nvidia.com/mig-<profile>, migStrategy mixed)",
    NodeReason.ISOLATION: "the pod's isolation or memory burst not offered",
    NodeReason.SHARES: "no free share on the GPUs",
    NodeReason.EXCLUSIVE: "GPUs already in use",
    NodeReason.MEMORY: "not enough free memory on one GPU",
    NodeReason.CORES: "not enough free cores on one GPU",
    NodeReason.MIG_PROFILE: "no free MIG instance of the profile",
    NodeReason.NUMA: "no NUMA node with enough free GPUs",
    NodeReason.NOT_CLAIMABLE: "no GPU in ResourceSlices: the node gives out GPUs by the device plugin, or its driver is not ready",
    NodeReason.CLAIMS: "no GPUs that meet all requests, selectors and constraints of the pod's claims",
}

OF_REJECT: Final[Mapping[Reject, NodeReason]] = {
    Reject.UNHEALTHY: NodeReason.UNAVAILABLE,
    Reject.CORDONED: NodeReason.UNAVAILABLE,
    Reject.MIG_MODE: NodeReason.MIG_MODE,
    Reject.TYPE: NodeReason.UNWANTED,
    Reject.UUID: NodeReason.UNWANTED,
    Reject.SHARES: NodeReason.SHARES,
    Reject.EXCLUSIVE: NodeReason.EXCLUSIVE,
    Reject.MEMORY: NodeReason.MEMORY,
    Reject.CORES: NodeReason.CORES,
    Reject.MIG_PROFILE: NodeReason.MIG_PROFILE,
    Reject.NUMA: NodeReason.NUMA,
    Reject.COUNT: NodeReason.COUNT,
}
