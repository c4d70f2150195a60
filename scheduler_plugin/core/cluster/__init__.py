# SPDX-License-Identifier: Apache-2.0
"""The cluster as the extender knows it: pods, nodes, GPUs, budgets, decisions."""
