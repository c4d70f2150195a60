# SPDX-License-Identifier: Apache-2.0
"""Decisions over thousands of nodes: columnar state, fit, score, reservations, preemption and their explanation.

Pure: no clock, environment, file, socket or log. Time comes in as an argument, in seconds.
"""
