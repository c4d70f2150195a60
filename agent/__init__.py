# SPDX-License-Identifier: Apache-2.0
"""The agent of a GPU node: offers its devices to kubelet and gives each starting container what its pod was assigned.

``core`` decides, with values in and values out. ``ports`` has what services need from the outside world, ``adapters`` provides it.
``services`` act on decisions and hold the loops. ``wiring`` constructs adapters and services, and ``__main__`` starts them. ``errors``
draws the tree of errors. ``mps`` is a program of its own, ``aliquot-mps``.
"""
