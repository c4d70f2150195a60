# SPDX-License-Identifier: Apache-2.0
"""The prediction of kube-scheduler's choice equals the choice of Kubernetes' own allocator, on random nodes and claims.

The allocator is the one of the version that the end-to-end suite runs, with its evaluation of CEL. The program around it is built from the
same modules as that suite, so this test needs a Go tool chain.
"""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from aliquot.contract.errors import ContractError
from aliquot.contract.units import parse_quantity
from scheduler_plugin.core.claims.extended import requests_for
from scheduler_plugin.core.claims.first_fit import SearchTooLongError, Taken, Usage, predict
from scheduler_plugin.core.claims.objects import check_whole, claim_of, devices_of
from scheduler_plugin.core.claims.selecting import meets
from scheduler_plugin.core.cluster.extended import ExtendedAsk
from tests.e2e.cluster.host import GO_BUILD
from tests.e2e.cluster.paths import CLUSTER_SOURCE

CASES, SELECTORS = 300, 100
"""Of a run of the suite; about half of the cases fit."""
MANY_CASES = 100_000
"""Of the long form."""
DRIVER, NODE = "gpu.aliquot.dev", "node-1"
NUMA = "resource.kubernetes.io/numaNode"
OURS = f"device.driver == '{DRIVER}'"
FAST = f"device.attributes['{DRIVER}'].model == 'fast'"
CLASSES: Mapping[str, Mapping[str, Any]] = {
    name: {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}
    for name, expression in (("any", OURS), ("fast", FAST))
}

RESOURCES = {"example.com/a": "any", "example.com/b": "fast"}
"""Extended resources, with their classes."""

Json = dict[str, Any]


class GivenUpError(AssertionError):
    """Kubernetes fails for the whole node, whatever else may fit there."""


class SelectorError(GivenUpError):
    """Kubernetes cannot evaluate a selector."""


class LimitError(GivenUpError):
    """A claim asks for more devices than it can have."""


GIVEN_UP = {
    "exceeds the claim limit": LimitError,
    "asks for all devices, but resource pool": GivenUpError,
    "a claim constraint would not be satisfied": GivenUpError,
    "CEL runtime error": SelectorError,
}


class Allocator:
    """Kubernetes' allocator, in a process that answers one case after another."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def allocate(self, case: Json) -> list[list[Json]] | None:
        """Return the devices of each claim; None if they do not fit. Raises GivenUpError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        for part, error in GIVEN_UP.items():
            if part in answer.get("error", ""):
                raise error(answer["error"])
        assert "error" not in answer, answer
        found: list[list[Json]] | None = answer["results"]
        return found

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate()


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Allocator]:
    if shutil.which("go") is None:
        pytest.skip("needs the Go tool chain to build Kubernetes' allocator, and `go` is not on the PATH")
    program = tmp_path_factory.mktemp("allocator") / "allocator"
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
    build = [*GO_BUILD, "-o", str(program), "./allocator"]
    built = subprocess.run(build, cwd=CLUSTER_SOURCE, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    one = Allocator(program)
    yield one
    one.stop()


# --- random selectors -----------------------------------------------------------------------------------------------

OWN, OF_NVIDIA = f"device.attributes['{DRIVER}']", "device.attributes['gpu.nvidia.com']"
MODEL, CAPABILITY, BUILD = f"{OWN}.model", f"{OF_NVIDIA}.cudaComputeCapability", f"{OF_NVIDIA}.driverVersion"
OF_NVIDIAS_MEMORY = "device.capacity['gpu.nvidia.com'].memory"
MEMORY, NODE_NUMBER, SPARE = f"device.capacity['{DRIVER}'].memory", "device.attributes['resource.kubernetes.io'].numaNode", f"{OWN}.spare"
VERSIONS = ["8.0.0", "8.6.0", "9.0.0", "10.0.0", "9.0.0-rc.1", "9.0.0-rc.1.x", "9.0.0-rc.2", "9.0.0-2", "9.0.0-10", "9.0.0+b1", "9.0.0--"]
PAIRS = list(itertools.product(VERSIONS, repeat=2))
MODELS = ["fast", "slow", "FAST", "NVIDIA H100 80GB", "a\"b'c\\d", "\u212a\u00c4", ""]
SIZES = ["4Gi", "8Gi", "8589934592", "8.5Gi", "10G", "10Gi", "16000000000000m", "16e9", "80Gi"]
SIGNS = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
EQUALITIES = st.sampled_from(["==", "!="])
NUMBERS = st.sampled_from(["-1", "0", "1", "007"])
LEFT_TO_KUBERNETES = [
    f"has({SPARE})",
    "'spare' in device.attributes",
    f"{MODEL}.size() > 3",
    f"{NODE_NUMBER} + 1 == 1",
    f"{NODE_NUMBER} == 0 ? true : {MODEL} == 'slow'",
    f"{CAPABILITY}.isGreaterThan(semver('v8.1', true))",
    f"{CAPABILITY}.major() >= 9",
    f"{MODEL}.upperAscii() == 'FAST'",
    f"{MEMORY}.compareTo(quantity('0.1n')) > 0",
    f"{MEMORY}.isInteger()",
    f"{MODEL} == 'f\\u0061st\\?'",
    "device.allowMultipleAllocations",
    f"cel.bind(own, {OWN}, own.model == 'fast')",
]
"""Selectors that are not known here."""
MISTAKES = [
    f"{OWN}.absent == 'x'",
    f"{MODEL}.isGreaterThan(semver('8.0.0'))",
    f"{MODEL}",
    f"!{NODE_NUMBER}",
    f"{NODE_NUMBER}.lowerAscii() == '1'",
    f"{CAPABILITY} == '9.0.0'",
    f"{CAPABILITY}.compareTo(quantity('1')) > 0",
    f"{MODEL} < 5",
    "device.capacity['gpu.nvidia.com'].engines.isGreaterThan(quantity('1'))",
]
"""Selectors that Kubernetes cannot evaluate."""
UNSURE = [*LEFT_TO_KUBERNETES, *MISTAKES, SPARE, f"!{SPARE}"]
"""Selectors by which a prediction may be left to kube-scheduler. Some devices lack what the last ones need."""
RARE = [
    f"{CAPABILITY} != '9.0.0'",
    f"'9.0.0' == {CAPABILITY}",
    f"{CAPABILITY} in ['9.0.0', '8.0.0']",
    f"{MODEL} in [{MODEL}, {CAPABILITY}]",
    f"semver('9.0.0') in [{CAPABILITY}]",
    f"{NODE_NUMBER} == 0 && {OWN}.absent == 'x'",
    f"{OWN}.absent == 'x' || {NODE_NUMBER} == 0",
    f"{MODEL} in [{MODEL}, {OWN}.absent]",
    f"!!{MODEL} == 'fast'",
]
"""Selectors that Kubernetes can evaluate in some cases."""


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@st.composite
def comparisons(draw: st.DrawFn) -> str:
    """Return a comparison that is known here."""
    texts, sign, number = st.sampled_from([*map(quoted, MODELS), "'fast'"]), draw(SIGNS), draw(NUMBERS)
    text = draw(st.sampled_from([MODEL, f"{MODEL}.lowerAscii()", "device.driver"]))
    version = f"semver('{draw(st.sampled_from(VERSIONS))}')"
    version, size = draw(st.sampled_from([version, version, BUILD])), f"quantity('{draw(st.sampled_from(SIZES))}')"
    method = draw(st.sampled_from(["isGreaterThan", "isLessThan"]))
    part = draw(st.sampled_from(["startsWith('fa')", "endsWith('st')", "contains('00 8')", "contains('')"]))
    pattern = draw(st.sampled_from(["^fa", "(?i)^FA.T$", "[0-9]+GB", "k", "(?i)k", "\\\\\\\\", ""]))
    return draw(
        st.sampled_from(
            [
                f"{text} {draw(EQUALITIES)} {draw(texts)}",
                f"{text} {draw(EQUALITIES)} {MODEL}",
                f"{text} in [{', '.join(draw(st.lists(texts, max_size=3)))}]",
                f"{text}.matches('{pattern}')",
                f"{text}.{part}",
                f"{NODE_NUMBER} {sign} {number}",
                f"{NODE_NUMBER} in [{number}, 2]",
                f"{NODE_NUMBER} {draw(EQUALITIES)} {MODEL}",
                f"!({NODE_NUMBER} == 0)",
                f"!({NODE_NUMBER} == 0) in [true, false]",
                f"{CAPABILITY}.{method}({version})",
                f"{CAPABILITY}.compareTo({version}) {sign} {number}",
                f"{CAPABILITY} {draw(EQUALITIES)} {version}",
                f"{MEMORY}.{method}({size})",
                f"{OF_NVIDIAS_MEMORY}.{method}({size})",
                f"{OF_NVIDIAS_MEMORY}.compareTo({size}) {sign} {number}",
                f"{size}.{method}({MEMORY})",
                f"{MEMORY}.compareTo({size}) {sign} {number}",
                f"{MEMORY} {draw(EQUALITIES)} {size}",
            ]
        )
    )


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Join selectors by && and ||, with ! before some."""
    pairs = st.builds("{} {} {}".format, parts, st.sampled_from(["&&", "||"]), parts)
    return pairs | st.builds("!({})".format, parts) | st.builds("({}) {} true".format, pairs, EQUALITIES)


KNOWN = st.recursive(comparisons(), joined, max_leaves=4)

# --- random nodes and claims ----------------------------------------------------------------------------------------

NVIDIAS_MEMORY = "gpu.nvidia.com/memory"
MEMORIES = st.sampled_from(["4Gi", "8Gi", "10Gi", "16Gi"])
ASKED = st.sampled_from(["1", "1Mi", "1000M", "2Gi", "2Gi", "4Gi", "5Gi", "10Gi"])
TAINTS = st.sampled_from([[], [], [], [], [], [{"key": "sick", "effect": "NoSchedule"}], [{"key": "odd", "value": "x", "effect": "None"}]])
TOLERANT = st.sampled_from([[{"operator": "Exists"}], [{"operator": "Exists"}], []])
TOLERATIONS = st.sampled_from([[], [], [{"key": "sick", "operator": "Exists"}], [{"operator": "Exists", "effect": "NoExecute"}]])


def memory_of(amount: str) -> Json:
    """The capacities of a device that a claim has alone."""
    return {name: {"value": amount} for name in ("memory", NVIDIAS_MEMORY)}


@st.composite
def attributes(draw: st.DrawFn) -> Json:
    versions, spare = (
        draw(st.sampled_from(PAIRS)),
        draw(st.sampled_from([{"spare": {"bool": True}}, {"spare": {"bool": False}}] * 20 + [{}])),
    )
    return {
        "model": {"string": draw(st.sampled_from(["fast"] * 8 + ["slow"] * 4 + MODELS))},
        NUMA: {"int": draw(st.integers(0, 1))},
        "gpu.nvidia.com/cudaComputeCapability": {"version": versions[0]},
        "gpu.nvidia.com/driverVersion": {"version": versions[1]},
        **spare,
    }


@st.composite
def shared_devices(draw: st.DrawFn, name: str) -> Json:
    memory = draw(MEMORIES)
    device: Json = {
        "name": name,
        "attributes": draw(attributes()),
        "capacity": {
            "memory": {"value": memory, "requestPolicy": {"default": memory, "validRange": {"min": "1Mi", "max": memory, "step": "1Mi"}}},
            "cores": {"value": "100", "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "100", "step": "1"}}},
            "shares": {"value": draw(st.sampled_from(["2", "16"])), "requestPolicy": {"default": "1", "validValues": ["1"]}},
            NVIDIAS_MEMORY: {"value": memory, "requestPolicy": {"default": "0", "validValues": ["0"]}},
        },
        "allowMultipleAllocations": True,
        "taints": draw(TAINTS),
    }
    return device


@st.composite
def devices(draw: st.DrawFn, name: str) -> Json:
    device = draw(shared_devices(name))
    if draw(st.integers(0, 4)) == 4:  # one that a claim has alone
        device |= {"allowMultipleAllocations": False, "capacity": memory_of("80Gi")}
    return device


def amounts(**values: object) -> Json:
    return {name.replace("_", "-"): {"value": str(value)} for name, value in values.items()}


def partition(gpu: Json, name: str, memory: str, counters: Json) -> Json:
    """A part of a GPU that a claim has alone."""
    own = {"allowMultipleAllocations": False, "capacity": memory_of(memory)}
    return {**gpu, **own, "name": f"{gpu['name']}-{name}", "consumesCounters": [{"counterSet": gpu["name"], "counters": counters}]}


@st.composite
def fixed_profiles(draw: st.DrawFn, gpu: Json) -> tuple[Json, list[Json]]:
    """A GPU with shares of any size, or else with shares of fixed sizes."""
    whole = amounts(memory="16Gi", shares=draw(st.sampled_from([2, 16])))
    sizes = draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=2, unique=True))
    fixed = [
        partition(gpu, f"{size}g-{number}", f"{size}Gi", amounts(memory=f"{size}Gi", shares=1)) for size in sizes for number in range(2)
    ]
    return whole, [{**gpu, "consumesCounters": [{"counterSet": gpu["name"], "counters": whole}]}, *fixed]


@st.composite
def mig_places(draw: st.DrawFn, gpu: Json) -> tuple[Json, list[Json]]:
    """Overlapping places for MIG instances, and the whole GPU."""
    whole = amounts(**{f"slice_{number}": 1 for number in range(4)}, engines=draw(st.integers(1, 3)))
    spans = draw(st.lists(st.sampled_from([(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (2, 2), (0, 4)]), min_size=1, max_size=5, unique=True))
    places = [
        partition(gpu, f"{size}-{start}", f"{4 * size}Gi", amounts(**{f"slice_{at}": 1 for at in range(start, start + size)}, engines=1))
        for start, size in spans
    ]
    shared = [{**gpu, "consumesCounters": [{"counterSet": gpu["name"], "counters": whole}]}] if draw(st.booleans()) else []
    return whole, draw(st.permutations([*shared, *places]))


@st.composite
def any_draws(draw: st.DrawFn, gpu: Json) -> tuple[Json, list[Json]]:
    """Devices that draw anything, at times what no set has."""
    found = []
    for number in range(draw(st.integers(1, 3))):
        names = draw(st.lists(st.sampled_from(["a"] * 20 + ["b"] * 20 + ["c"]), min_size=1, max_size=2, unique=True))
        counters = amounts(**{name: draw(st.integers(0, 3)) for name in names})
        shared = {} if draw(st.booleans()) else {"allowMultipleAllocations": False}
        listed = [{"counterSet": gpu["name"], "counters": counters}] if draw(st.booleans()) else []
        found.append({**gpu, **shared, "name": f"{gpu['name']}-{number}", "consumesCounters": listed})
    return amounts(a=draw(st.integers(0, 4)), b=2), found


@st.composite
def with_counters(draw: st.DrawFn, names: list[str]) -> tuple[list[Json], list[Json]]:
    """Devices, and the sets of counters that they draw on."""
    sets, found = [], []
    for name in names:
        gpu = draw(shared_devices(name))
        if (form := draw(st.sampled_from([None, fixed_profiles, mig_places, any_draws]))) is None:
            found.append(gpu)
            continue
        counters, listed = draw(form(gpu))
        sets.append({"name": name, "counters": counters})
        found += listed
    return found, sets + (sets[:1] if draw(st.integers(0, 40)) == 40 else [])


@st.composite
def slices(draw: st.DrawFn) -> list[Json]:
    found = []
    numbers = itertools.count()
    for pool in draw(st.lists(st.sampled_from([NODE, "a-pool", "z-pool"]), min_size=1, max_size=3, unique=True)):
        count, generation, drawing = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.booleans())
        own, sets = [], []
        for part in draw(st.permutations(range(count))):
            node = NODE if draw(st.integers(0, 20)) < 20 else "node-2"
            names = [f"gpu-{next(numbers)}" for _ in range(draw(st.sampled_from([0, 1, 2] if drawing else [0, 2, 3, 4, 5])))]
            listed, further = draw(with_counters(names)) if drawing and node == NODE else ([draw(devices(name)) for name in names], [])
            sets += further
            own.append((f"{pool}-{part}", node, {"devices": listed}))
        if sets:  # they are for the whole pool, on any node
            own.append(
                (
                    f"{pool}-{draw(st.sampled_from(['0-counters', 'counters']))}",
                    draw(st.sampled_from([NODE, NODE, "node-2"])),
                    {"sharedCounters": sets},
                )
            )
        for name, node, content in draw(st.permutations(own)):
            missing = draw(st.integers(0, 30)) == 30
            spec = {
                "driver": DRIVER,
                "nodeName": node,
                "pool": {"name": pool, "generation": generation - missing, "resourceSliceCount": len(own)},
                **content,
            }
            found.append({"metadata": {"name": name}, "spec": spec})
    return found


@st.composite
def selectors(draw: st.DrawFn) -> str:
    """Return a selector, usually one that is known here and that all devices can meet."""
    return draw(st.sampled_from(UNSURE) if draw(st.integers(0, 9)) == 9 else comparisons())


@st.composite
def modes(draw: st.DrawFn) -> Json:
    if draw(st.integers(0, 5)) == 5:
        return {"allocationMode": "All"}
    return {"allocationMode": "ExactCount", "count": draw(st.sampled_from([1, 1, 1, 1, 2, 2, 3, 17]))}


@st.composite
def exactly(draw: st.DrawFn) -> Json:
    mode = draw(modes())
    asked = draw(st.fixed_dictionaries({}, optional={"memory": ASKED, "cores": st.sampled_from(["1", "30", "60"])}))
    if draw(st.integers(0, 50)) == 50:
        asked[draw(st.sampled_from(["unknown", NVIDIAS_MEMORY]))] = "1"
    return {
        "deviceClassName": draw(st.sampled_from(["any", "any", "fast"])),
        **mode,
        **({"capacity": {"requests": asked}} if asked else {}),
        **({"selectors": [{"cel": {"expression": draw(selectors())}}]} if draw(st.integers(0, 4)) == 4 else {}),
        **({"tolerations": found} if (found := draw(TOLERANT if mode["allocationMode"] == "All" else TOLERATIONS)) else {}),
    }


@st.composite
def claims(draw: st.DrawFn, name: str) -> Json:
    requests: list[Json] = []
    for number in range(draw(st.sampled_from([1, 1, 2, 3]))):
        if draw(st.integers(0, 3)) < 3:
            admin = {"adminAccess": True} if draw(st.integers(0, 5)) == 5 else {}
            requests.append({"name": f"r{number}", "exactly": {**draw(exactly()), **admin}})
        else:
            subrequests = [{"name": f"s{place}", **draw(exactly())} for place in range(draw(st.integers(1, 3)))]
            requests.append({"name": f"r{number}", "firstAvailable": subrequests})
    named = draw(st.sampled_from([[], ["r0"], [request["name"] for request in requests]]))
    # Kubernetes gives up where a constraint excludes one of all devices, so such cases tell little.
    is_constrained = draw(st.integers(0, 7)) == 0 if '"All"' in json.dumps(requests) else draw(st.booleans())
    constraints = [{"matchAttribute": NUMA, **({"requests": named} if named else {})}] if is_constrained else []
    return {
        "metadata": {"name": name, "namespace": "d", "uid": name},
        "spec": {"devices": {"requests": requests, "constraints": constraints}},
    }


@st.composite
def claims_for_resources(draw: st.DrawFn, name: str) -> Json:
    """The claim that kube-scheduler makes for the extended resources of a pod."""
    asks = [
        ExtendedAsk(number, position, resource, draw(st.integers(1, 2)), is_brief=number < 1 and draw(st.booleans()))
        for number in range(draw(st.integers(1, 3)))
        for position, resource in enumerate(RESOURCES)
        if draw(st.booleans())
    ]
    requests = [request for _, request in requests_for(asks, RESOURCES)]
    return {"metadata": {"name": name, "namespace": "d", "uid": name}, "spec": {"devices": {"requests": requests}}}


@st.composite
def cases(draw: st.DrawFn) -> Json:
    found = draw(slices())
    allocated = []
    for one in found:
        for device in one["spec"].get("devices", ()):
            key = {"driver": DRIVER, "pool": one["spec"]["pool"]["name"], "device": device["name"]}
            if not device["allowMultipleAllocations"]:
                allocated += [key] if draw(st.integers(0, 3)) == 3 else []
            elif draw(st.booleans() if device.get("consumesCounters") else st.sampled_from([False, False, True])):
                consumed = {"memory": draw(ASKED), "cores": draw(st.sampled_from(["1", "50", "100"])), "shares": "1"}
                allocated.append({**key, "consumed": consumed})
    asked = [draw(claims(f"claim-{number}")) for number in range(draw(st.sampled_from([1, 1, 2, 3])))]
    if draw(st.integers(0, 5)) == 5:
        asked[-1] = draw(claims_for_resources("special"))
    return {"node": NODE, "classes": list(CLASSES.values()), "slices": found, "claims": asked, "allocated": allocated}


def predicted(case: Json) -> Sequence[Sequence[Taken]] | None:
    consumed = {
        _key(one): {name: parse_quantity(text) for name, text in one["consumed"].items()} for one in case["allocated"] if "consumed" in one
    }
    usage = Usage(frozenset(_key(one) for one in case["allocated"] if "consumed" not in one), consumed)
    asked = [claim_of(claim, CLASSES) for claim in case["claims"]]
    if any(claim.takes_all for claim in asked):
        check_whole(case["node"], case["slices"])
    return predict(devices_of(case["node"], case["slices"]), usage, asked, meets)


def _key(one: Mapping[str, str]) -> tuple[str, str, str]:
    return one["driver"], one["pool"], one["device"]


def as_taken(result: Json) -> Taken:
    consumed: Mapping[str, Fraction] = {name: parse_quantity(text) for name, text in result.get("consumedCapacity", {}).items()}
    return Taken(result["request"], _key(result), consumed)


@pytest.mark.timeout(1200)  # the first run builds Kubernetes' modules
@settings(max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_prediction_is_the_allocation_of_kubernetes(allocator: Allocator, case: Json) -> None:
    compare(allocator, case)


@pytest.mark.soak
@pytest.mark.timeout(21600)
@settings(max_examples=MANY_CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(cases())
def test_prediction_is_the_allocation_in_many_cases(allocator: Allocator, case: Json) -> None:
    compare(allocator, case)


def compare(allocator: Allocator, case: Json) -> None:
    try:
        prediction = predicted(case)
    except SearchTooLongError:  # the allocator would take as many steps
        reject()
    except ContractError:
        assert is_unsure(case) or is_given_up(allocator, case)
        return
    try:
        found = allocator.allocate(case)
    except SelectorError:  # kube-scheduler gives up the pod, without a look at predictions
        assert is_unsure(case)
        return
    except LimitError:
        found = None
    expected = None if found is None else [[as_taken(result) for result in results] for results in found]
    assert prediction == expected


def is_unsure(case: Json) -> bool:
    written = json.dumps(case, ensure_ascii=False)
    return any(quoted(one) in written for one in UNSURE)


def is_given_up(allocator: Allocator, case: Json) -> bool:
    try:
        allocator.allocate(case)
    except GivenUpError:
        return True
    return False


# --- selectors alone ------------------------------------------------------------------------------------------------

ONE_DEVICE = st.builds(
    lambda found, memory: {"name": "gpu", "attributes": found, "capacity": memory_of(memory)},
    attributes(),
    st.sampled_from(SIZES),
)
CERTAIN = KNOWN | st.sampled_from(MISTAKES)
ANY = st.sampled_from([*LEFT_TO_KUBERNETES, *MISTAKES, *RARE])


@pytest.mark.timeout(1200)
@settings(max_examples=SELECTORS, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(CERTAIN, ONE_DEVICE)
def test_selector_means_what_it_means_to_kubernetes(allocator: Allocator, selector: str, device: Json) -> None:
    assert meaning(selector, device) == meaning_to_kubernetes(allocator, selector, device)


@pytest.mark.soak
@pytest.mark.timeout(21600)
@settings(max_examples=MANY_CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(CERTAIN, ONE_DEVICE)
def test_many_selectors_mean_what_they_mean_to_kubernetes(allocator: Allocator, selector: str, device: Json) -> None:
    assert meaning(selector, device) == meaning_to_kubernetes(allocator, selector, device)


@pytest.mark.timeout(1200)
@settings(max_examples=SELECTORS, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.recursive(ANY | comparisons(), joined, max_leaves=3), ONE_DEVICE)
def test_other_selector_is_left_to_kubernetes_or_evaluated_as_there(allocator: Allocator, selector: str, device: Json) -> None:
    assert meaning(selector, device) in (None, meaning_to_kubernetes(allocator, selector, device))


def meaning(selector: str, device: Json) -> bool | None:
    """Return whether a device meets a selector; None if it is left to kube-scheduler."""
    try:
        return meets(selector, devices_of(NODE, [slice_of(device)])[0])
    except ContractError:
        return None


def meaning_to_kubernetes(allocator: Allocator, selector: str, device: Json) -> bool | None:
    """Return whether Kubernetes allocates a device by a selector; None if it cannot evaluate that."""
    asked = {"deviceClassName": "any", "allocationMode": "ExactCount", "count": 1, "selectors": [{"cel": {"expression": selector}}]}
    claim = {"metadata": {"name": "c", "namespace": "d", "uid": "c"}, "spec": {"devices": {"requests": [{"name": "r", "exactly": asked}]}}}
    case = {"node": NODE, "classes": list(CLASSES.values()), "slices": [slice_of(device)], "claims": [claim], "allocated": []}
    try:
        return allocator.allocate(case) is not None
    except SelectorError:
        return None


def slice_of(device: Json) -> Json:
    pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    return {"metadata": {"name": "slice"}, "spec": {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": [device]}}
