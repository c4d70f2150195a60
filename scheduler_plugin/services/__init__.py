# SPDX-License-Identifier: Apache-2.0
"""Loops that join the core and the ports: the watch on the cluster, leadership, and the retry of pods that wait."""
