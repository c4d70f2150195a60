# SPDX-License-Identifier: Apache-2.0
"""The admission check for Kueue: what a workload needs, which seats it gets now, and what to answer."""
