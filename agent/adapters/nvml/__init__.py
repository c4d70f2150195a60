# SPDX-License-Identifier: Apache-2.0
"""NVML: the one place that calls it. ``driver`` is what services use; the other modules are its parts."""
