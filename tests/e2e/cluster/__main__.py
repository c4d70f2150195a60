# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.e2e.cluster up|down|status|build|images|helm``: the cluster of the suite, to look around in; ``build`` makes all that
the first run would make, ``images`` those for other clusters, and ``helm`` what the manifests' tests need, which is no cluster.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.cluster.cluster import Cluster, base_images, elapsed
from tests.e2e.cluster.host import (
    CONTAINERD,
    HELM,
    JOBSET,
    KUBERNETES,
    KUEUE,
    KWOK,
    LWS,
    UnavailableError,
    built_programs,
    operator_definitions,
    require_machine,
)
from tests.e2e.product import all_images, product_images


def _up(cluster: Cluster) -> int:
    started = time.monotonic()
    try:
        cluster.up(owned=False)
    except UnavailableError as missing:
        sys.stderr.write(f"no cluster: {missing}\n")
        return 1
    sys.stdout.write(f"up in {elapsed(started)}\n\nexport KUBECONFIG={cluster.kubeconfig}\n{cluster.kubectl().program} get nodes\n")
    return 0


def _down(cluster: Cluster) -> int:
    started = time.monotonic()
    cluster.down()
    sys.stdout.write(f"down in {elapsed(started)}\n")
    return 0


def _status(cluster: Cluster) -> int:
    if not cluster.is_up():
        sys.stdout.write("no cluster is running\n")
        return 1
    sys.stdout.write(cluster.kubectl().run("get", "nodes,pods", "--all-namespaces", "--output=wide"))
    return 0


def _build(cluster: Cluster) -> int:
    """Compiling uses the processors, and the product's images mostly the network: both at once."""
    del cluster
    started = time.monotonic()
    try:
        require_machine()
    except UnavailableError as missing:
        sys.stderr.write(f"nothing is built: {missing}\n")
        return 1
    with ThreadPoolExecutor() as pool:
        ours = pool.submit(product_images)
        for programs in (HELM, KUBERNETES, CONTAINERD, KUEUE, JOBSET, LWS, KWOK):
            built_programs(programs)
        ours.result()
    operator_definitions()
    base_images()
    all_images()
    sys.stdout.write(f"built in {elapsed(started)}\n")
    return 0


def _images(cluster: Cluster) -> int:
    del cluster
    for archive in (*base_images(), *all_images()):
        sys.stdout.write(f"{archive}\n")
    return 0


def _helm(cluster: Cluster) -> int:
    del cluster
    sys.stdout.write(f"{built_programs(HELM)}\n")
    return 0


_COMMANDS = {"up": _up, "down": _down, "status": _status, "build": _build, "images": _images, "helm": _helm}


def main() -> int:
    """Run one command; the exit status says whether it did what it says."""
    if len(sys.argv) != 2 or sys.argv[1] not in _COMMANDS:
        sys.stderr.write(f"usage: python -m tests.e2e.cluster {'|'.join(_COMMANDS)}\n")
        return 2
    return _COMMANDS[sys.argv[1]](Cluster())


if __name__ == "__main__":
    sys.exit(main())
