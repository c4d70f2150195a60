# SPDX-License-Identifier: Apache-2.0
"""Which nodes can take a request, and which is the best: one pass over all nodes."""
