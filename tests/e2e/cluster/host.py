# SPDX-License-Identifier: Apache-2.0
"""What the suite needs of the machine: root, Debian's packages, and the programs built from their Go modules.

Everything built is kept below ``build/e2e/bin/<key>``; the key is a hash of what was pinned and how it was built, so a
second run builds nothing and a changed pin never runs an old program.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster.paths import BUILD, CLUSTER_SOURCE


class UnavailableError(Exception):
    """This machine cannot run the suite; the message says what is missing and how to get it."""


@dataclass(frozen=True, slots=True)
class GoModule:
    """A module that a go.mod of ours pins: the folder of that go.mod, and its path."""

    folder: Path
    path: str


@dataclass(frozen=True, slots=True)
class GoPrograms:
    """Programs that are built together."""

    module: GoModule
    stamp: str
    """The linker's options that write the version into them."""
    packages: tuple[str, ...]
    stand_ins: tuple[tuple[str, str], ...] = ()
    """Files that the published module lacks, each with the file of the module that is compiled in its place."""

    @property
    def names(self) -> tuple[str, ...]:
        """How Go names them: the last part of a package's path that is no version."""
        return tuple(re.sub(r"/v\d+$", "", package).rpartition("/")[2] for package in self.packages)


_KUBERNETES_VERSION = "k8s.io/component-base/version"

KUBERNETES = GoPrograms(
    GoModule(CLUSTER_SOURCE, "k8s.io/kubernetes"),
    f"-X {_KUBERNETES_VERSION}.gitVersion={{version}} -X {_KUBERNETES_VERSION}.gitMajor=1 -X {_KUBERNETES_VERSION}.gitMinor={{minor}}",
    (
        "k8s.io/kubernetes/cmd/kube-apiserver",
        "k8s.io/kubernetes/cmd/kube-controller-manager",
        "k8s.io/kubernetes/cmd/kube-scheduler",
        "k8s.io/kubernetes/cmd/kubectl",
        "k8s.io/kubernetes/cmd/kubelet",
    ),
)
CONTAINERD = GoPrograms(
    GoModule(CLUSTER_SOURCE / "containerd", "github.com/containerd/containerd/v2"),
    "-X github.com/containerd/containerd/v2/version.Version={version}",
    (
        "github.com/containerd/containerd/v2/cmd/containerd",
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        "github.com/containerd/containerd/v2/cmd/ctr",
    ),
)
HELM = GoPrograms(
    GoModule(CLUSTER_SOURCE / "helm", "helm.sh/helm/v4"),
    "-X helm.sh/helm/v4/internal/version.version={version}",
    ("helm.sh/helm/v4/cmd/helm", "sigs.k8s.io/kustomize/kustomize/v5"),
)

_CONTROLLERS = CLUSTER_SOURCE / "controllers"
"""One go.mod for all controllers that use the same Kubernetes libraries: the compiler then takes these once."""

KWOK = GoPrograms(
    GoModule(_CONTROLLERS, "sigs.k8s.io/kwok"), "-X sigs.k8s.io/kwok/pkg/consts.Version={version}", ("sigs.k8s.io/kwok/cmd/kwok",)
)
KUEUE = GoPrograms(
    GoModule(_CONTROLLERS, "sigs.k8s.io/kueue"), "-X sigs.k8s.io/kueue/pkg/version.GitVersion={version}", ("sigs.k8s.io/kueue/cmd/kueue",)
)
JOBSET = GoPrograms(GoModule(_CONTROLLERS, "sigs.k8s.io/jobset"), "", ("sigs.k8s.io/jobset",))
LWS = GoPrograms(GoModule(_CONTROLLERS, "sigs.k8s.io/lws"), "", ("sigs.k8s.io/lws/cmd",))


def _operator(folder: str, path: str, *programs: str, stand_ins: tuple[tuple[str, str], ...] = ()) -> GoPrograms:
    """Return programs with a go.mod of their own. Args: programs: their folders in the module; empty for the module itself."""
    return GoPrograms(GoModule(CLUSTER_SOURCE / folder, path), "", tuple(f"{path}/{name}".rstrip("/") for name in programs), stand_ins)


KUBERAY = _operator("kuberay", "github.com/ray-project/kuberay/ray-operator", "")
TRAINING_OPERATOR = _operator("training-operator", "github.com/kubeflow/training-operator", "cmd/training-operator.v1")
MPI_OPERATOR = _operator("mpi-operator", "github.com/kubeflow/mpi-operator", "cmd/mpi-operator")
TRAINER = _operator("trainer", "github.com/kubeflow/trainer/v2", "cmd/trainer-controller-manager")
ARGO = _operator(
    "argo",
    "github.com/argoproj/argo-workflows/v4",
    "cmd/argoexec",
    "cmd/workflow-controller",
    # The one for macOS has POSIX calls only.
    stand_ins=(("workflow/executor/osspecific/signal_linux.go", "workflow/executor/osspecific/signal_darwin.go"),),
)
PROMETHEUS_OPERATOR = GoModule(CLUSTER_SOURCE / "monitoring", "github.com/prometheus-operator/prometheus-operator")

GO_BUILD = ("go", "build", "-p", "2", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false")
"""Without symbols, which take the compiler time and which the linker leaves out. Builds with the same options share what they compile."""
_BUILD_SECONDS = 3600
_FETCH_SECONDS = 300

DEBIAN_PACKAGES = {
    "/usr/bin/etcd": "etcd-server",
    "/usr/sbin/runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/bin/busybox": "busybox-static",
    "/usr/sbin/ip": "iproute2",
    "/usr/bin/unshare": "util-linux",
    "/usr/bin/openssl": "openssl",
    "/usr/sbin/debootstrap": "debootstrap",
    "/usr/bin/musl-gcc": "musl-tools",
}


def require_machine() -> None:
    """Have root and Debian's packages, or raise UnavailableError."""
    _require_root()
    _require_debian_programs()


def _require_root() -> None:
    """A kubelet and container runtime need root; nothing here tries to do without."""
    if os.geteuid() != 0:
        raise UnavailableError(
            "the local cluster needs root (namespaces, mounts, cgroups): run as root, or set KUBECONFIG to use another cluster"
        )


def _require_debian_programs() -> None:
    """Install what Debian provides and this machine lacks; say what is missing where that is impossible."""
    missing = _missing_packages()
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise UnavailableError(f"missing {', '.join(missing)} (names of Debian packages), and there is no apt-get to install them with")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-q"], env=environment, capture_output=True, text=True, check=False)  # an old list may still do
    installed = subprocess.run(
        ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if _missing_packages():
        reason = installed.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise UnavailableError(f"apt-get could not install {', '.join(_missing_packages())}: {reason[0]}")


def built_programs(programs: GoPrograms) -> Path:
    """Build the programs when this pin was not built before; a process that comes while another builds them waits.

    Returns: the folder that holds them.
    """
    folder = program_folder(programs)
    if _complete(folder, programs):
        return folder
    if shutil.which("go") is None:
        raise UnavailableError(f"the Go tool chain is needed to build {', '.join(programs.names)}, and `go` is not on the PATH")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{_prefix(programs)}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _complete(folder, programs):
            _build(programs, folder, lock.fileno())
    return folder


def _complete(folder: Path, programs: GoPrograms) -> bool:
    return all((folder / name).exists() for name in programs.names)


def _build(programs: GoPrograms, folder: Path, lock: int) -> None:
    """Args: lock: a descriptor that the compiler inherits, so that a build that was cut off holds its place until it has ended."""
    version = _pinned_version(programs)
    unfinished = folder.with_name(folder.name + ".unfinished")
    unfinished.mkdir(exist_ok=True)
    stamp = programs.stamp.format(version=version, minor=version.split(".")[1])
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
    with _completed(programs) as options:
        build = [*GO_BUILD, *options, "-ldflags", f"-s -w {stamp}", "-o", f"{unfinished}/", *programs.packages]
        result = subprocess.run(
            ["nice", "-n", "19", *build],
            cwd=programs.module.folder,
            env=environment,
            pass_fds=[lock],
            capture_output=True,
            text=True,
            timeout=_BUILD_SECONDS,
            check=False,
        )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(build)} in {programs.module.folder} failed:\n{result.stderr[-4000:]}")
    unfinished.rename(folder)
    for outdated in set(folder.parent.glob(f"{_prefix(programs)}-*")) - {folder}:
        shutil.rmtree(outdated)


@contextmanager
def _completed(programs: GoPrograms) -> Iterator[Sequence[str]]:
    """Yield the options that build from a copy of the module with the stand-ins; none where it lacks no file."""
    if not programs.stand_ins:
        yield ()
        return
    with tempfile.TemporaryDirectory() as made:
        folder, pins = Path(made), programs.module.folder
        source = shutil.copytree(module_source(programs.module), folder / "source", copy_function=shutil.copyfile)
        for missing, other in programs.stand_ins:
            (source / missing).parent.chmod(0o755)  # folders of the module cache are read-only
            shutil.copyfile(source / other, source / missing)
        (folder / "go.mod").write_text(f"{(pins / 'go.mod').read_text()}\nreplace {programs.module.path} => {source}\n")
        shutil.copyfile(pins / "go.sum", folder / "go.sum")
        yield ("-modfile", str(folder / "go.mod"))


def program_folder(programs: GoPrograms) -> Path:
    """The folder that holds the programs of this pin once they are built."""
    return BUILD / "bin" / _build_key(programs)


def module_source(module: GoModule) -> Path:
    """The source tree of a pinned module, as the Go tool chain keeps it; downloaded when it is not there."""
    if shutil.which("go") is None:
        raise UnavailableError(f"the Go tool chain is needed to fetch {module.path}, and `go` is not on the PATH")
    fetched = ["go", "mod", "download", "-json", module.path]
    environment = {**os.environ, "GOFLAGS": "-mod=readonly"}
    answer = subprocess.run(
        fetched, cwd=module.folder, env=environment, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False
    )
    if answer.returncode != 0:
        raise RuntimeError(f"{' '.join(fetched)} in {module.folder} failed:\n{answer.stdout}{answer.stderr}")
    return Path(json.loads(answer.stdout)["Dir"])


def operator_definitions() -> Path:
    """The folder of the Prometheus Operator's kinds."""
    return module_source(PROMETHEUS_OPERATOR) / "example/prometheus-operator-crd"


def _missing_packages() -> list[str]:
    return [package for program, package in DEBIAN_PACKAGES.items() if not Path(program).exists()]


def _build_key(programs: GoPrograms) -> str:
    """The pins, the packages and the stamp decide what is built."""
    stand_ins = [f"{missing}={other}" for missing, other in programs.stand_ins]
    digest = hashlib.sha256(" ".join([programs.stamp, *programs.packages, *stand_ins]).encode())
    for pins in ("go.mod", "go.sum"):
        digest.update((programs.module.folder / pins).read_bytes())
    return f"{_prefix(programs)}-{digest.hexdigest()[:16]}"


def _prefix(programs: GoPrograms) -> str:
    return f"{programs.module.folder.name}-{programs.names[-1]}"


def _pinned_version(programs: GoPrograms) -> str:
    listed = ["go", "list", "-mod=readonly", "-m", "-f", "{{.Version}}", programs.module.path]
    return subprocess.run(listed, cwd=programs.module.folder, capture_output=True, text=True, check=True).stdout.strip()
