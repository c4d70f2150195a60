# SPDX-License-Identifier: Apache-2.0
"""The pure domain of one node: a pod's request, what is free on its devices, whether both fit, and which devices to take.

Values in, values out: no clock, environment, file or network. Agent and scheduler decide with the same code.
"""
