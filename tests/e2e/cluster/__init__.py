# SPDX-License-Identifier: Apache-2.0
"""A whole Kubernetes cluster of one node on this machine: etcd, the control plane, kubelet, containerd, runc and a bridge.

``Cluster`` brings it up and takes it down; ``python -m tests.e2e.cluster up|down|status`` does so from a shell. The node is a set of
namespaces (``namespaces.py``), so no part of it outlives it. The programs are real and pinned (``host.py``), the images are made here
(``images.py``, and ``release/dockerfile.py`` for the product's).
"""
