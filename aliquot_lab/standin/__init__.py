# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the parts of a Kubernetes node that are not Aliquot's, with their real interfaces.

``cluster`` and ``apiserver`` are the Kubernetes API, ``devices``, ``plugins`` and ``kubelet`` the kubelet, ``cdi`` and ``runtime`` the
container runtime, ``hardware`` the GPUs of the machine, and ``node`` combines them with a real agent process. They need no root.

Invariant: the stand-ins do not know how the agent works. The agent meets only the documented interfaces, as on a real node.
"""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # the user of a stand-in decides where its log goes
