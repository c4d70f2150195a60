# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims: the templates that requests become, and the devices that kube-scheduler will take for claims."""
