"""Why a node cannot take a pod: a dozen fixed sentences, because kube-scheduler counts nodes by equal text.

Explanations have two more, which kube-scheduler says by itself where it asks: ``core.kube_filters``.

What exactly each device lacked is in placement.refusal and in the explanation of a decision; here details would only break up the counts.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from placement.fit import Reject


class NodeReason(Enum):
    """One sentence each; the order of the numbers is free, they only index columns. FITS is no reason."""

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

    @property
    def sentence(self) -> str:
        """What kube-scheduler puts into the pod's events, after the number of nodes."""
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
    NodeReason.UNWANTED: "GPUs not of the type or UUID the pod wants",
    NodeReason.MIG_MODE: "GPUs in MIG mode, given out as instances only (nvidia.com/mig-<profile>, migStrategy mixed)",
    NodeReason.ISOLATION: "isolation or memory burst that the pod wants not offered",
    NodeReason.SHARES: "no free share on the GPUs",
    NodeReason.EXCLUSIVE: "GPUs used by others",
    NodeReason.MEMORY: "not enough free memory on one GPU",
    NodeReason.CORES: "not enough free cores on one GPU",
    NodeReason.MIG_PROFILE: "no free MIG instance of the profile",
    NodeReason.NUMA: "no NUMA node with enough free GPUs",
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
