# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot_lab.standin.errors import InvalidError
from aliquot_lab.standin.pods import Role, is_extended_resource, parse_amount, read_pod, requested


def pod(containers, init=(), **spec):
    return {
        "metadata": {"name": "p", "namespace": "default", "uid": "u"},
        "spec": {"containers": containers, "initContainers": list(init), **spec},
    }


def container(name, amount, **more):
    return {"name": name, "resources": {"limits": {"nvidia.com/vgpu": amount, "cpu": "100m"}}, **more}


def test_a_sidecar_is_an_init_container_that_restarts():
    spec = read_pod(pod([container("main", 1)], [container("init", 1), container("side", 1, restartPolicy="Always")]))
    assert [(item.name, item.role) for item in spec.containers] == [("init", Role.INIT), ("side", Role.SIDECAR), ("main", Role.APP)]


@pytest.mark.parametrize(("init", "total"), [(1, 5), (7, 7)])
def test_admission_counts_what_runs_together_or_the_largest_init_container(init, total):
    spec = read_pod(pod([container("a", 2), container("b", 3)], [container("init", init)]))
    assert requested(spec) == {"nvidia.com/vgpu": total}


def test_only_extended_resources_are_read():
    assert read_pod(pod([container("main", "2")])).containers[0].limits == (("nvidia.com/vgpu", 2),)


@pytest.mark.parametrize(("text", "amount"), [("0", 0), ("3", 3), ("4Gi", 4 * 2**30), ("20k", 20_000), ("8Ki", 8192)])
def test_whole_quantities_are_read(text, amount):
    assert parse_amount(text) == amount


@pytest.mark.parametrize("text", ["", "1.5", "-1", "100m", "4GiB", "x"])
def test_other_quantities_are_refused(text):
    with pytest.raises(InvalidError):
        parse_amount(text)


@pytest.mark.parametrize(
    ("name", "extended"), [("nvidia.com/vgpu", True), ("cpu", False), ("kubernetes.io/x", False), ("a.kubernetes.io/x", False)]
)
def test_extended_resources_have_their_own_domain(name, extended):
    assert is_extended_resource(name) is extended


def test_environment_from_elsewhere_is_refused():
    with pytest.raises(InvalidError, match="valueFrom"):
        read_pod(pod([container("main", 1, env=[{"name": "A", "valueFrom": {}}])]))
