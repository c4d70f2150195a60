# SPDX-License-Identifier: Apache-2.0
"""Plans for several pods: gangs, and victims of preemption."""
