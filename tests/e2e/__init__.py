# SPDX-License-Identifier: Apache-2.0
"""The product as shipped, on real Kubernetes components, looked at from the outside.

    python -m pytest tests/e2e -m e2e                     on a cluster of its own (root; the first run compiles it)
    python -m tests.e2e.cluster build                     make what the first run would: programs and images
    python -m tests.e2e.cluster up                        leave a cluster running: later runs use it; `down` ends it
    KUBECONFIG=... python -m pytest tests/e2e -m e2e      on another cluster, which has the images of
    python -m tests.e2e.cluster images                    ... loaded into its nodes' runtime

``cluster/`` brings up the components, ``product.py`` installs ours from deploy/, ``kubectl.py`` is how scenarios ask.
"""
