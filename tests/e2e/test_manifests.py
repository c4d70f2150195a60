"""Every variant of the manifests is taken by a real API server, which knows every field of them."""

from pathlib import Path

import pytest

from tests.e2e.cluster.paths import ROOT
from tests.e2e.kubectl import Kubectl

DAEMONSET = ROOT / "deploy/daemonset"
VARIANTS = [DAEMONSET, *sorted((DAEMONSET / "overlays").iterdir())]
ADOPTING = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{daemonset}/base, {daemonset}/scheduler]
components: [{daemonset}/components/adopt-nvidia-gpu, {daemonset}/components/mig]
"""


@pytest.mark.parametrize("folder", VARIANTS, ids=lambda folder: folder.name)
def test_the_api_server_takes_every_object_and_knows_every_field(product: Kubectl, folder: Path) -> None:
    product.run("apply", f"--kustomize={folder}", "--dry-run=server", "--validate=strict")


def test_components_apply_to_the_default_installation(product: Kubectl, scratch_in_tree: Path) -> None:
    daemonset = Path("../" * len(scratch_in_tree.relative_to(ROOT).parts)) / "deploy/daemonset"
    (scratch_in_tree / "kustomization.yaml").write_text(ADOPTING.format(daemonset=daemonset))
    product.run("apply", f"--kustomize={scratch_in_tree}", "--dry-run=server", "--validate=strict")


def test_the_api_server_found_no_fault_in_the_policies_expressions(product: Kubectl) -> None:
    policies = [item for item in product.all("validatingadmissionpolicies") if item["metadata"]["name"].startswith("aliquot-")]
    warnings = {policy["metadata"]["name"]: policy["status"].get("typeChecking", {}).get("expressionWarnings") for policy in policies}
    assert len(warnings) == 4
    assert not any(warnings.values()), warnings
