# SPDX-License-Identifier: Apache-2.0
"""The commands for operators, as ``aliquot …`` and ``kubectl vgpu …``: show, explain and cordon a cluster's GPUs, and check a node.

Each command is a module that is imported when the command runs. The data comes from the API server: GpuNode objects, pods, and the pages of
the agents and the scheduler through its pod proxy. So the user's kubeconfig and roles are enough, and no extra server is needed.
"""
