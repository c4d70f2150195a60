# SPDX-License-Identifier: Apache-2.0
"""Extended resources, which device plugins or DeviceClasses give out. Pure.

Source: IsDRAExtendedResourceName of kube-scheduler
"""

from typing import Final, NamedTuple

CLASS_PREFIX: Final = "deviceclass.resource.kubernetes.io/"
"""Each DeviceClass gives out the extended resource of this prefix and its name. Source: KEP-5004."""


class ExtendedAsk(NamedTuple):
    """What one container requests of an extended resource."""

    container: int
    """Its place among the containers, the init containers first."""
    position: int
    """The resource's place among all that the container requests, sorted by name."""
    resource: str
    amount: int
    is_brief: bool = False
    """Whether the container ends before later ones start."""


def is_extended(resource: str) -> bool:
    """Whether a resource is an extended one."""
    native = "/" not in resource or "kubernetes.io/" in resource or resource.startswith("requests.")
    return not native or resource.startswith(CLASS_PREFIX)
