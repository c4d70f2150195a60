# SPDX-License-Identifier: Apache-2.0
"""Every variant of the manifests is taken by a real API server, which knows every field of them."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster.paths import ROOT
from tests.e2e.kubectl import Kubectl, Object

DAEMONSET = ROOT / "deploy/daemonset"
VARIANTS = [DAEMONSET, *sorted((DAEMONSET / "overlays").iterdir()), ROOT / "deploy/monitoring"]
ADOPTING = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{daemonset}/base, {daemonset}/scheduler]
components: [{daemonset}/components/adopt-nvidia-gpu, {daemonset}/components/mig]
"""


@pytest.mark.usefixtures("operator_kinds")
@pytest.mark.parametrize("folder", VARIANTS, ids=lambda folder: folder.name)
def test_the_api_server_takes_every_object_and_knows_every_field(
    looked_at: Callable[[Iterable[Object]], None], product: Kubectl, folder: Path
) -> None:
    looked_at(kustomized(product, folder))


def test_components_apply_to_the_default_installation(
    looked_at: Callable[[Iterable[Object]], None], product: Kubectl, scratch_in_tree: Path
) -> None:
    daemonset = Path("../" * len(scratch_in_tree.relative_to(ROOT).parts)) / "deploy/daemonset"
    (scratch_in_tree / "kustomization.yaml").write_text(ADOPTING.format(daemonset=daemonset))
    looked_at(kustomized(product, scratch_in_tree))


def kustomized(product: Kubectl, folder: Path) -> Iterable[Object]:
    """The objects of a folder of deploy/, as kubectl makes them."""
    return yaml.safe_load_all(product.run("kustomize", str(folder)))


def test_the_api_server_found_no_fault_in_the_policies_expressions(product: Kubectl) -> None:
    policies = [item for item in product.all("validatingadmissionpolicies") if item["metadata"]["name"].startswith("aliquot-")]
    warnings = {policy["metadata"]["name"]: policy["status"].get("typeChecking", {}).get("expressionWarnings") for policy in policies}
    assert len(warnings) == 7
    assert not any(warnings.values()), warnings
