# SPDX-License-Identifier: Apache-2.0
"""``aliquot simulate --nodes --pods``: what a cluster would do with a list of pods over time, under a policy and under others.

The scheduler's own code judges the nodes, chooses devices, keeps the amounts and searches for victims. The clock is simulated. All
policies have the same queue, gangs and preemption, so results differ only by the choice of node and devices.
"""
