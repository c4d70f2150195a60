# SPDX-License-Identifier: Apache-2.0
"""The cost of a node: pure functions over the columns of the cluster."""
