# SPDX-License-Identifier: Apache-2.0
"""``aliquot doctor``: checks whether a node can share its GPUs. Each finding comes with a fix.

Each module checks one subject and yields findings; ``command`` runs all of them and prints the result.

Invariant: read-only. The checks read files below a root and connect to sockets. NVML and rpm run in child processes.
"""
