# SPDX-License-Identifier: Apache-2.0
"""Decisions of the agent as values in, values out: no clock, environment, file, socket, gRPC or NVML in here."""
