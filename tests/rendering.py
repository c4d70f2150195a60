# SPDX-License-Identifier: Apache-2.0
"""Manifests as users apply them: the output of kustomize and Helm for deploy/."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.cluster.host import HELM, program_folder

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DAEMONSET = DEPLOY / "daemonset"
CHART = DEPLOY / "helm/aliquot"
EXAMPLES = DEPLOY / "examples"
NAMESPACE = "aliquot-system"

Object = dict[str, Any]
_NEEDED = {"dra-planned": ("dra",), "dra-both": ("dra", "dra-planned")}
"""Components that others change, before them."""


class RenderError(AssertionError):
    """A program failed; the message is its error output."""


@dataclass(frozen=True, slots=True)
class Installation:
    """One way to install the product: an overlay (or the defaults), components, and with or without monitoring."""

    overlay: str = "default"
    components: tuple[str, ...] = ()
    monitoring: bool = False

    def __str__(self) -> str:
        return "+".join([self.overlay, *self.components, *(["monitoring"] if self.monitoring else [])])

    @property
    def kustomization(self) -> Object:
        """Return the kustomization, for a folder directly below build/."""
        folder = "../../deploy/daemonset" + ("" if self.overlay == "default" else f"/overlays/{self.overlay}")
        return {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [folder, *(["../../deploy/monitoring"] if self.monitoring else [])],
            "components": [f"../../deploy/daemonset/components/{name}" for name in self.components],
        }

    @property
    def values(self) -> Object:
        """Return the values of the chart."""
        switches = dict.fromkeys(("serviceMonitors", "alerts", "dashboards"), self.monitoring)
        return {"variant": self.overlay, "components": list(self.components), "monitoring": switches}


def installations() -> list[Installation]:
    """Return every installation that deploy/ offers: each overlay, each component with what it needs, all components, monitoring."""
    overlays, components = _folders("overlays"), _folders("components")
    return [
        Installation(),
        Installation(monitoring=True),
        *(Installation(overlay) for overlay in overlays),
        *(Installation(components=(*_NEEDED.get(component, ()), component)) for component in components),
        Installation(components=tuple(components)),
    ]


@dataclass(frozen=True, slots=True)
class Renderer:
    """Helm and kustomize."""

    helm: str
    kustomize: str
    scratch: Path
    """A folder directly below build/: kustomize refers to other folders by relative paths only."""

    def kustomized(self, installation: Installation) -> list[Object]:
        """Return the objects from kustomize."""
        (self.scratch / "kustomization.yaml").write_text(yaml.safe_dump(installation.kustomization))
        return _objects(_run([self.kustomize, "build", str(self.scratch)]))

    def charted(self, values: Object, *arguments: str, chart: Path = CHART) -> list[Object]:
        """Return the objects of a release of the chart, without hooks.

        Raises: RenderError: the chart refuses these values.
        """
        return _objects(_run([*self._template(arguments, chart), "--no-hooks"], values))

    def hooks(self, values: Object) -> list[Object]:
        """Return the hooks of a release, such as those of ``helm test``."""
        return [
            item for item in _objects(_run(self._template((), CHART), values)) if "helm.sh/hook" in item["metadata"].get("annotations", {})
        ]

    def run_helm(self, *arguments: str, timeout_seconds: float = 60) -> str:
        """Run another command of Helm; return its output. Raises RenderError."""
        return _run([self.helm, *arguments], timeout_seconds=timeout_seconds)

    def _template(self, arguments: Sequence[str], chart: Path) -> list[str]:
        return [self.helm, "template", "aliquot", str(chart), f"--namespace={NAMESPACE}", "--kube-version=1.36", "--values=-", *arguments]


def find_renderer(scratch: Path) -> Renderer | None:
    """Return Helm and kustomize, built at their pinned versions or from the PATH; None where one is missing. Builds nothing."""
    helm, kustomize = (_program(name) for name in HELM.names)
    return Renderer(helm, kustomize, scratch) if helm and kustomize else None


def _program(name: str) -> str | None:
    built = program_folder(HELM) / name
    return str(built) if built.exists() else shutil.which(name)


def _run(command: Sequence[str], values: Object | None = None, timeout_seconds: float = 60) -> str:
    given = yaml.safe_dump(values or {})
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    if done.returncode != 0:
        raise RenderError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _objects(text: str) -> list[Object]:
    return [document for document in yaml.safe_load_all(text) if document]


def _folders(kind: str) -> list[str]:
    return sorted(path.parent.name for path in (DAEMONSET / kind).glob("*/kustomization.yaml"))


def pods_of(path: Path) -> Iterator[Object]:
    """Yield every pod, and the pod templates of Jobs and Deployments."""
    for item in yaml.safe_load_all(path.read_text()):
        if item["kind"] == "Pod":
            yield item
        elif "template" in item.get("spec", {}):
            yield {"metadata": {"name": item["metadata"]["name"]}, **item["spec"]["template"]}
