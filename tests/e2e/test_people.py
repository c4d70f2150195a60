# SPDX-License-Identifier: Apache-2.0
"""What the roles for people allow: `aliquot` works for a user who has them, and does not go further than they do."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.kubectl import Kubectl, KubectlError, eventually
from tests.e2e.product import AGENT_NAMESPACE, Slice, slice_pod


class Person:
    """A service account in the role of a user, with a kubeconfig of its own."""

    def __init__(self, kubectl: Kubectl, name: str, folder: Path) -> None:
        self.account = f"{kubectl.namespace}:{name}"
        kubectl.run("create", "serviceaccount", name)
        cluster = json.loads(kubectl.run("config", "view", "--raw", "--minify", "--output=json"))
        token = kubectl.run("create", "token", name).strip()
        cluster["users"] = [{"name": name, "user": {"token": token}}]
        cluster["contexts"] = [{"name": name, "context": {"cluster": cluster["clusters"][0]["name"], "user": name}}]
        self.kubeconfig = folder / name
        self.kubeconfig.write_text(yaml.safe_dump({**cluster, "current-context": name}))

    def aliquot(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line as this person."""
        command = [sys.executable, "-m", "aliquot_cli", *arguments, f"--kubeconfig={self.kubeconfig}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def person(product: Kubectl, kubectl: Kubectl, tmp_path: Path) -> Iterator[Callable[..., Person]]:
    """Make somebody who has cluster roles, and may look into our namespace."""
    made: list[tuple[Kubectl, str, str]] = []

    def bind(where: Kubectl, kind: str, name: str, *arguments: str) -> None:
        where.run("create", kind, name, *arguments)
        made.append((where, kind, name))

    def make(name: str, *cluster_roles: str) -> Person:
        somebody = Person(kubectl, name, tmp_path)
        for role in cluster_roles:
            bind(product, "clusterrolebinding", f"{name}-{role}", f"--clusterrole={role}", f"--serviceaccount={somebody.account}")
        bind(product.within(AGENT_NAMESPACE), "rolebinding", name, "--role=aliquot-user", f"--serviceaccount={somebody.account}")
        return somebody

    yield make
    for where, kind, name in made:
        where.delete(kind, name)


def test_a_user_sees_gpus_and_learns_why_a_pod_waits(person: Callable[..., Person], kubectl: Kubectl, node_name: str) -> None:
    user = person("user", "aliquot-user")
    kubectl.apply(slice_pod("too-large", Slice(1 << 20)))
    eventually(lambda: kubectl.events("too-large"), "the scheduler to say why", otherwise=lambda: kubectl.explain("too-large"))
    gpus = user.aliquot("get", "gpus", "-o", "json")
    assert gpus.returncode == 0, gpus.stderr
    assert json.loads(gpus.stdout)
    top = user.aliquot("top", "-o", "json")
    assert top.returncode == 0, top.stderr
    assert node_name in top.stdout
    why = user.aliquot("why", f"{kubectl.namespace}/too-large")
    assert why.returncode == 4, why.stderr
    assert "memory" in why.stdout


def test_only_an_operator_takes_gpus_out_of_service(person: Callable[..., Person], product: Kubectl, node_name: str) -> None:
    user, operator = person("user", "aliquot-user"), person("operator", "aliquot-operator")
    refused = user.aliquot("cordon", node_name)
    assert refused.returncode == 1
    assert "forbidden" in refused.stderr
    try:
        assert operator.aliquot("cordon", node_name).returncode == 0
        assert product.get("gpunode", node_name)["spec"]["cordoned"] is True
    finally:
        back = operator.aliquot("uncordon", node_name)
    assert back.returncode == 0, back.stderr
    assert not product.get("gpunode", node_name).get("spec", {}).get("cordoned")


def test_who_may_look_at_everything_may_look_at_the_inventory(product: Kubectl) -> None:
    rules = product.get("clusterrole", "view")["rules"]
    assert [rule["verbs"] for rule in rules if rule.get("resources") == ["gpunodes"]] == [["get", "list", "watch"]]


@pytest.mark.parametrize(
    "command",
    [
        ("get", "pods", "--namespace=kube-system"),
        ("get", "secrets", f"--namespace={AGENT_NAMESPACE}"),
        ("get", "--raw=/api/v1/namespaces/kube-system/pods/some:80/proxy/"),
        ("delete", "pods", "--all", f"--namespace={AGENT_NAMESPACE}"),
        ("delete", "gpunodes", "--all"),
    ],
    ids=" ".join,
)
def test_the_roles_go_no_further(person: Callable[..., Person], product: Kubectl, command: tuple[str, ...]) -> None:
    operator = person("operator", "aliquot-user", "aliquot-operator")
    with pytest.raises(KubectlError, match="is forbidden"):
        product.run(*command, f"--as=system:serviceaccount:{operator.account}")
