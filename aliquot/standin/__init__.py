"""Stand-ins for the parts of a Kubernetes node that are not ours, speaking their real contracts.

``cluster`` and ``apiserver`` are the Kubernetes API, ``devices``, ``plugins`` and ``kubelet`` the kubelet, ``cdi`` and ``runtime`` the
container runtime, ``hardware`` the GPUs of the machine, and ``node`` puts them together with a real agent process. Nothing here needs root,
and nothing here knows how the agent works: the agent must not be able to tell this node from a real one by anything it is promised.
"""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # who uses a stand-in decides whether to see its log
