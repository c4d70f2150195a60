# SPDX-License-Identifier: Apache-2.0
"""Consolidation: moves of running pods that free room for a waiting pod, planned and proved on a copy of the cluster's state."""
