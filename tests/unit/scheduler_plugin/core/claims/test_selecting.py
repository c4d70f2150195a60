# SPDX-License-Identifier: Apache-2.0
"""Cases with a name; tests/property/test_first_fit.py compares with Kubernetes' own evaluation."""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.contract.errors import ContractError
from aliquot.contract.model import ContainerRequest, Preferences
from aliquot.contract.units import parse_quantity
from aliquot.placement import model_name
from scheduler_plugin.core.claims.first_fit import Capacity, Device
from scheduler_plugin.core.claims.selecting import meets
from scheduler_plugin.core.claims.templates import template_of

OURS, NVIDIA = "gpu.aliquot.dev", "gpu.nvidia.com"


def device(model: str = "NVIDIA H200", uuid: str = "GPU-a") -> Device:
    attributes = {
        f"{OURS}/type": ("string", "gpu"),
        f"{OURS}/productName": ("string", model),
        f"{OURS}/uuid": ("string", uuid),
        "resource.kubernetes.io/numaNode": ("int", 1),
        "x.y/flag": ("bool", True),
        f"{NVIDIA}/cudaComputeCapability": ("version", "9.0.0"),
    }
    return Device((OURS, "n1", "gpu-0"), {"memory": Capacity(parse_quantity("40Gi"))}, attributes=attributes)


LEAVES = st.sampled_from(["a", "B", "-", ".", "[ab]", "[^a]", "[a-c]", "^", "$", "", "a?", "b{2}", "\\\\w"])
PATTERNS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda left, right: left + right, inner, inner),
        st.builds(lambda left, right: f"({left}|{right})", inner, inner),
        st.builds(lambda group, times: f"({group}){times}", inner, st.sampled_from(["", "*", "+"])),
    ),
    max_leaves=6,
)
ATTRIBUTES = f"device.attributes['{OURS}']"
CAPABILITY, MEMORY = f"device.attributes['{NVIDIA}'].cudaComputeCapability", f"device.capacity['{OURS}'].memory"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("device.driver == 'gpu.aliquot.dev'", True),
        ('device.driver == "gpu.nvidia.com"', False),
        ("device.driver != 'gpu.nvidia.com'", True),
        (f"device.driver == '{OURS}' && {ATTRIBUTES}.type == 'gpu'", True),
        (f"device.driver == 'x' || {ATTRIBUTES}.type == 'gpu'", True),
        (f"!({ATTRIBUTES}.uuid in ['GPU-b', \"GPU-a\"])", False),
        (f"{ATTRIBUTES}.uuid in []", False),
        (f"{ATTRIBUTES}.productName.matches('(?i)h200')", True),
        (f"!{ATTRIBUTES}.productName.matches('^H200')", True),
        (f"{ATTRIBUTES}.productName.matches('^NVIDIA (H100|H\\\\d{{3}})$')", True),
        ("device.attributes['resource.kubernetes.io'].numaNode == 1", True),
        ("device.attributes['resource.kubernetes.io'].numaNode == 0", False),
        ("device.attributes['x.y'].flag", True),
        ("device.attributes['x.y'].flag == false || false == true", False),
        (f"(device.driver == 'a' || device.driver == '{OURS}') && !(device.driver == 'b')", True),
        ("!device.attributes['x.y'].flag in [true, false]", True),
        (f"({ATTRIBUTES}.type == 'mig') == false", True),
        (f"{ATTRIBUTES}.productName.lowerAscii().matches('^nvidia h200$')", True),
        (f"{ATTRIBUTES}.productName.lowerAscii() == 'NVIDIA H200'", False),
        ("'HÄ'.lowerAscii() == 'hÄ'", True),
        (f"{ATTRIBUTES}.productName.startsWith('NVIDIA') && {ATTRIBUTES}.productName.endsWith('00')", True),
        (f"{ATTRIBUTES}.productName.contains('h2')", False),
        (f"{CAPABILITY}.isGreaterThan(semver('8.0.0'))", True),
        (f"{CAPABILITY}.isGreaterThan(semver('9.0.0'))", False),
        (f"{CAPABILITY}.isLessThan(semver('10.0.0'))", True),
        (f"{CAPABILITY}.compareTo(semver('9.0.0-rc.1')) > 0", True),
        (f"{CAPABILITY}.compareTo(semver('12.0.0')) == -1", True),
        (f"{CAPABILITY} == semver('9.0.0+build')", True),
        (f"{MEMORY}.compareTo(quantity('40Gi')) >= 0", True),
        (f"{MEMORY}.compareTo(quantity('42949672961')) >= 0", False),
        (f"{MEMORY}.isGreaterThan(quantity('40G'))", True),
        (f"{MEMORY}.isLessThan(quantity('40Gi'))", False),
        (f"{MEMORY} == quantity('40960Mi')", True),
    ],
)
def test_comparison_is_evaluated(expression: str, expected: bool) -> None:
    assert meets(expression, device()) is expected


@pytest.mark.parametrize(
    "expression",
    [
        f"{ATTRIBUTES}.absent == 'x'",
        f"{ATTRIBUTES}.uuid in ['GPU-a', {ATTRIBUTES}.absent]",
        f"{ATTRIBUTES}.uuid == 'GPU\\?'",
        f"{ATTRIBUTES}.uuid < 'GPU-b'",
        f"{ATTRIBUTES}.uuid.isLessThan(semver('8.0.0'))",
        f"{CAPABILITY} == '9.0.0'",
        f"{CAPABILITY} != '9.0.0'",
        f"{CAPABILITY} in ['9.0.0']",
        f"{CAPABILITY}.isGreaterThan(semver('8.0'))",
        f"{CAPABILITY}.isGreaterThan(semver('8.0', true))",
        f"{CAPABILITY}.isGreaterThan(quantity('8'))",
        f"{MEMORY}.isGreaterThan(quantity('0.1n'))",
        f"{MEMORY}.isGreaterThan(quantity('40 Gi'))",
        f"{MEMORY}.isGreaterThan(40)",
        f"device.capacity['{NVIDIA}'].memory.isGreaterThan(quantity('1'))",
        "device.attributes['resource.kubernetes.io'].numaNode.lowerAscii() == '1'",
        "'x' in device.attributes",
        f"{ATTRIBUTES}.productName.matches('(?=a)')",
        f"{ATTRIBUTES}.productName.matches('\\\\pL{{1000}}')",
        f"{ATTRIBUTES}.productName.matches('\\ud800')",
        f"{ATTRIBUTES}.uuid.matches('a') == 1 1",
        f"{ATTRIBUTES}.productName",
        f"{ATTRIBUTES}.productName.matches('(')",
        "device.driver == ",
        "device.driver == 'a' 'b'",
        "device.driver == 'a",
        "",
        "(" * 4000,
    ],
)
def test_other_expression_is_not_guessed(expression: str) -> None:
    with pytest.raises(ContractError):
        meets(expression, device())


@given(PATTERNS, st.booleans(), st.text("abB-", max_size=6))
def test_pattern_means_what_it_means_to_python(pattern: str, ignores_case: bool, model: str) -> None:
    pattern = f"(?i){pattern}" if ignores_case else pattern
    found = meets(f"{ATTRIBUTES}.productName.matches('{pattern}')", device(model))
    assert found is (re.search(pattern.replace("\\\\", "\\"), model) is not None)


@pytest.mark.parametrize("pattern", ["(.*.*)*x", "(.*)*" * 40 + "x", "(N|N|.)(V|V|.)" * 20 + "x", "((((N*)*)*)*)*x", "[A-Z ]*" * 60 + "x"])
def test_pattern_with_many_ways_ends(pattern: str) -> None:
    """Python's own search would take years."""
    assert not meets(f"{ATTRIBUTES}.productName.matches('{pattern}')", device("NVIDIA H100 80GB HBM3" * 3))


@given(st.text(max_size=60))
def test_any_text_is_evaluated_or_refused(text: str) -> None:
    with contextlib.suppress(ContractError):
        assert meets(text, device()) in (True, False)


@given(
    st.sampled_from(["h200", "H20", "A10*", "*H20*", "=NVIDIA H200"]), st.sampled_from(["NVIDIA H200", "NVIDIA H20", "NVIDIA A100-SXM4"])
)
def test_selectors_of_our_templates_mean_what_placement_means(name: str, model: str) -> None:
    spec = template_of(ContainerRequest("main", 1), Preferences(gpu_type=(name,))).spec
    selectors = [one["cel"]["expression"] for one in spec["devices"]["requests"][0]["exactly"]["selectors"]]
    assert all(meets(one, device(model)) for one in selectors) is model_name.matches(name, model)


def test_uuids_of_our_templates_are_compared() -> None:
    spec = template_of(ContainerRequest("main", 1), Preferences(gpu_uuid=("GPU-a",), gpu_uuid_not=("GPU-b",))).spec
    selectors = [one["cel"]["expression"] for one in spec["devices"]["requests"][0]["exactly"]["selectors"]]
    assert [all(meets(one, device(uuid=uuid)) for one in selectors) for uuid in ("GPU-a", "GPU-b")] == [True, False]
