# SPDX-License-Identifier: Apache-2.0
"""Where the scenarios run: the local cluster, or the one KUBECONFIG names.

Where neither is available the suite is skipped and reports what is missing; a scenario that cannot run never passes.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster, running_cluster
from tests.e2e.cluster.host import KUBERNETES, UnavailableError, built_programs, operator_definitions
from tests.e2e.cluster.namespaces import cgroup_name
from tests.e2e.cluster.paths import BUILD, RUN
from tests.e2e.invariants import Invariants
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import AGENT_NAMESPACE, PLAIN, all_images, install, metrics, roll_out, uninstall

_SCENARIO_SECONDS = 240
_CLUSTERS = 2
_WITHOUT_PRODUCT = {"bare", "without_product"}
_TOGETHER = (
    ("test_without_dra", "test_mig", "test_dra_as_134", "test_dra", "test_dra_planned", "test_dra_both"),
    (
        "test_migration", "test_queues", "test_owner_groups", "test_consolidation", "test_backfill", "test_whole_gpus", "test_mps",
        "test_without_scheduler",
    ),
)  # fmt: skip
"""Files that one process runs, in this order: their variants of the product follow each other without a rollback in between."""
_LONG = (
    "test_storms", "test_node_faults", "test_gpu_faults", "test_scheduler_faults", "test_examples", "test_slices", "test_audit",
    "test_restarts", "test_admission", "test_workloads",
)  # fmt: skip
"""Further files that take minutes. They come before the others, so that all processes end at the same time."""
_LOG_SIZES = pytest.StashKey[Mapping[str, int]]()


@dataclass(frozen=True, slots=True)
class Target:
    """The cluster under test."""

    kubectl: Kubectl
    local: Cluster | None
    """The cluster on this machine; None when KUBECONFIG names another one."""
    is_kept: bool = False
    """Whether the cluster was there before this run, and is afterwards."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "scale: the measurements on a thousand nodes (make e2e ARGS='-m scale')")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many clusters share the scenarios: most of a scenario's time is waiting, so a second cluster halves the time of the run.

    One process runs them all where there is one cluster for all (``KUBECONFIG``, or one that ``up`` left running), or where its
    output is wanted as it comes (``-s``).
    """
    one = os.environ.get("KUBECONFIG") or config.getoption("capture") == "no" or Cluster().is_up()
    return 0 if one else _CLUSTERS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in (one for one in items if Path(__file__).parent in one.path.parents):
        if item.get_closest_marker("scale") is None and item.get_closest_marker("soak") is None:
            item.add_marker(pytest.mark.e2e)
        own = item.get_closest_marker("timeout")
        seconds = own.args[0] if own is not None else _SCENARIO_SECONDS
        # fixtures bring up a cluster and, the first time, compile it: their steps have limits of their own
        item.add_marker(pytest.mark.timeout(seconds, func_only=True), append=False)
    items.sort(key=_order(items))


class _ByFiles(LoadFileScheduling):
    """Gives whole files to the processes, and those of _TOGETHER to one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((" ".join(files) for files in _TOGETHER if Path(file).stem in files), file)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return _ByFiles(config, log) if config.getoption("dist") == "loadfile" else None


def _order(items: Iterable[pytest.Item]) -> Callable[[pytest.Item], tuple[bool, int, bool]]:
    """Return the sort key: scenarios that need the product come last, and the longest files of those first.

    One process runs all scenarios of a file, so files that need no product at all come before those with both kinds.
    """
    first = [*(name for files in _TOGETHER for name in files), *_LONG]

    def needs_product(item: pytest.Item) -> bool:
        return _WITHOUT_PRODUCT.isdisjoint(getattr(item, "fixturenames", ()))

    files = {item.path for item in items if needs_product(item)}
    ranks = {name: rank for rank, name in enumerate(first)}
    return lambda item: (item.path in files, ranks.get(item.path.stem, len(ranks)), needs_product(item))


@contextmanager
def _or_end(request: pytest.FixtureRequest, what: str) -> Iterator[None]:
    """End the run where ``what`` cannot be had: two hundred scenarios would only say the same, one after the other."""
    try:
        yield
    except UnavailableError:
        raise  # this machine cannot; that is no failure
    except Exception:
        request.session.shouldfail = f"{what} cannot be had"
        raise


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The cluster under test, for the whole run."""
    named = os.environ.get("KUBECONFIG")
    if named:
        yield Target(Kubectl(shutil.which("kubectl") or str(built_programs(KUBERNETES) / "kubectl"), Path(named)), local=None, is_kept=True)
        return
    before, is_kept = _machine(), Cluster().is_up()
    with ExitStack() as cluster:
        try:
            with _or_end(request, "a cluster"):
                local = cluster.enter_context(running_cluster())
        except UnavailableError as missing:
            pytest.skip(f"no cluster to test on: {missing}")
        yield Target(local.kubectl(), local, is_kept)
    left = _machine() - before
    assert not left, f"the cluster is down and left behind: {sorted(left)}"


def _machine() -> set[str]:
    """What a careless cluster would leave: mounts, interfaces, cgroups, files at the usual places."""
    mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    interfaces = {str(path) for path in Path("/sys/class/net").iterdir()}
    # unlike a glob, this passes over folders that another cluster of this machine removes meanwhile
    cgroups = {f"{folder}/{name}" for folder, names, _ in os.walk("/sys/fs/cgroup") for name in names if name == cgroup_name(RUN)}
    files = {str(path) for folder in ("/var/lib", "/run", "/etc/cni", "/opt") for path in Path(folder).glob("*")}
    return mounts | interfaces | cgroups | files


@pytest.fixture(scope="session")
def node(target: Target) -> Cluster:
    """The local cluster, for scenarios that stop its components, look at its files or change its GPUs."""
    if target.local is None:
        pytest.skip("this scenario stops components of the node, or changes it: it runs on the local cluster only")
    return target.local


@pytest.fixture(scope="session")
def supplied(target: Target, request: pytest.FixtureRequest) -> Target:
    """The cluster with every image; one that is not ours must have them already (``python -m tests.e2e.cluster images`` makes them)."""
    if target.local is not None:
        with _or_end(request, "the images"):
            for archive in all_images():
                target.local.import_image(archive)
    return target


@pytest.fixture(scope="session")
def installation(supplied: Target, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """The product, installed from the manifests on simulated GPUs, in any variant. A cluster that is kept gets it without one."""
    with _or_end(request, "the product, installed,"):
        install(supplied.kubectl)
    yield supplied.kubectl
    if supplied.is_kept:
        roll_out(supplied.kubectl, PLAIN)


@pytest.fixture(scope="module")
def product(installation: Kubectl, request: pytest.FixtureRequest) -> Kubectl:
    """The product in the variant that the module states; kubectl for the objects of no namespace."""
    roll_out(installation, getattr(request.module, "VARIANT", PLAIN))
    return installation


@pytest.fixture(scope="module")
def without_product(target: Target) -> None:
    """The product is not installed in the cluster: its policies would refuse the bindings of these processes."""
    assert not target.kubectl.all("namespaces", f"--field-selector=metadata.name={AGENT_NAMESPACE}"), "these scenarios run first"


@pytest.fixture
def bare(supplied: Target) -> Iterator[Target]:
    """A cluster that has the images and nothing else of ours; what was installed before is there again afterwards."""
    kubectl = supplied.kubectl
    installed = kubectl.all("namespaces", f"--field-selector=metadata.name={AGENT_NAMESPACE}")
    if installed:
        uninstall(kubectl)
    yield supplied
    kubectl.delete("namespace", AGENT_NAMESPACE)  # Helm leaves the one it made
    if installed:
        install(kubectl)


@pytest.fixture(scope="session")
def looked_at(installation: Kubectl) -> Callable[[Iterable[Object]], None]:
    """Have the API server validate objects as strictly as it can: each one once, even if several installations have it."""
    taken: set[str] = set()

    def look(objects: Iterable[Object]) -> None:
        fresh = {text: one for one in objects if (text := json.dumps(one, sort_keys=True)) not in taken}
        if fresh:
            installation.run("apply", "--filename=-", "--dry-run=server", "--validate=strict", stdin=yaml.safe_dump_all(fresh.values()))
        taken.update(fresh)

    return look


@pytest.fixture(scope="session")
def operator_kinds(installation: Kubectl) -> Iterator[None]:
    """The kinds of the Prometheus Operator that our monitoring has objects of; a cluster that has them already keeps its own."""
    kinds = ("servicemonitors", "prometheusrules")
    missing = [kind for kind in kinds if not installation.run("get", "crd", f"{kind}.monitoring.coreos.com", "--ignore-not-found")]
    try:
        definitions = {kind: operator_definitions() / f"monitoring.coreos.com_{kind}.yaml" for kind in missing}
    except UnavailableError as lacking:
        pytest.skip(f"the Prometheus Operator's kinds are not in this cluster: {lacking}")
    for definition in definitions.values():
        installation.run("apply", "--server-side", f"--filename={definition}")
    installation.wait_until_served(*(f"{kind}.monitoring.coreos.com" for kind in missing))
    yield
    for kind in missing:
        installation.delete("crd", f"{kind}.monitoring.coreos.com")


@pytest.fixture
def node_name(product: Kubectl) -> str:
    """A node the agent runs on."""
    system = product.within(AGENT_NAMESPACE)
    agent = ("--selector=app.kubernetes.io/name=aliquot-agent", "--field-selector=status.phase=Running")
    return eventually(lambda: system.all("pods", *agent)[0]["spec"]["nodeName"], "an agent that runs")


@pytest.fixture
def shared_gpu(product: Kubectl, node_name: str) -> str:
    """The UUID of a GPU, for pods that must share one."""

    def reported() -> list[str]:
        return [labels["device_uuid"] for name, labels, _ in metrics(product, node_name) if name == "aliquot_device_memory_total_bytes"]

    return eventually(reported, "the agent to report its GPUs")[0]


@pytest.fixture
def invariants(kubectl: Kubectl, product: Kubectl, node_name: str, shared_gpu: str) -> Invariants:
    """Two containers that share a GPU, and what must hold of them and their node whatever happens next."""
    made = Invariants(kubectl, product, node_name, shared_gpu)
    made.begin()
    return made


@pytest.fixture(scope="module")
def scratch_in_tree() -> Iterator[Path]:
    """A folder of this source tree, for what must be near its files; kustomize goes nowhere else."""
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        yield Path(folder)


@pytest.fixture
def kubectl(target: Target, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """kubectl in a namespace of the test's own, gone with its pods when the test ends."""
    name = f"e2e-{re.sub('[^a-z0-9]+', '-', request.node.name.lower())[-40:].strip('-')}"
    with own_namespace(target, name, adopted=request.node.get_closest_marker("adopted") is not None) as own:
        yield own


def namespace_object(name: str, labels: dict[str, str]) -> Object:
    """A namespace that has its labels from the start: the API server's webhooks see a later one after a moment."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


@contextmanager
def own_namespace(target: Target, name: str, *, adopted: bool = False) -> Iterator[Kubectl]:
    """kubectl in a new namespace, which is gone with its pods after the block. Args: adopted: whether it serves other systems' words."""
    labels = {contract.LABEL_ADOPT: "true"} if adopted else {}
    target.kubectl.api.send("POST", "/api/v1/namespaces", namespace_object(name, labels))
    own = target.kubectl.within(name)
    try:
        wait_until_pods_are_accepted(own)
        yield own
    finally:
        own.delete("pods", "--all")
        target.kubectl.delete("namespace", name, wait=False)


def wait_until_pods_are_accepted(own: Kubectl) -> None:
    """Wait for the account of a new namespace: a controller makes it, which takes a while after the control plane was restarted."""
    eventually(lambda: own.find("serviceaccount", "default"), "the namespace's service account")


def pytest_runtest_call(item: pytest.Item) -> None:
    """Remember where each component's log stood, so that a failure shows what was written since."""
    target = getattr(item, "funcargs", {}).get("target")
    if isinstance(target, Target) and target.local is not None:
        item.stash[_LOG_SIZES] = target.local.log_sizes()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Put the last telling lines of each component under a failed scenario."""
    outcome = yield
    report = outcome.get_result()
    target = getattr(item, "funcargs", {}).get("target")
    if report.failed and isinstance(target, Target) and target.local is not None:
        report.sections.append(("what each component said last", target.local.short_logs(item.stash.get(_LOG_SIZES, {}))))
