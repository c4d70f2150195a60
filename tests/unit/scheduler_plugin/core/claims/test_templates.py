# SPDX-License-Identifier: Apache-2.0
import copy

import msgspec
import pytest

from aliquot.contract.model import ContainerRequest, CoresMode, Isolation, NumaMode, Preferences, Priority
from aliquot.contract.parameters import preferences_of
from aliquot.contract.units import MIB
from aliquot.placement.request import RequestError
from scheduler_plugin.core.claims.templates import KEEP_SECONDS, TOUCH_SECONDS, has_content, is_due, is_old, is_ours, template_of


def asked(vgpus: int = 1, mib: int | None = None, cores: int | None = None, **fields) -> ContainerRequest:
    return ContainerRequest("main", vgpus, None if mib is None else mib * MIB, cores, **fields)


def exactly(request: ContainerRequest, **preferences) -> dict:
    return template_of(request, Preferences(**preferences)).spec["devices"]["requests"][0]["exactly"]


@pytest.mark.parametrize(
    ("mib", "vgpus", "memory"),
    [(4000, 1, "4000Mi"), (1024, 1, "1Gi"), (20480, 2, "10Gi"), (1024 * 1024, 1, "1Ti"), (1536, 1, "1536Mi")],
)
def test_memory_is_per_gpu_in_the_notation_of_the_api(mib, vgpus, memory):
    found = exactly(asked(vgpus, mib, 60))
    assert found["capacity"] == {"requests": {"memory": memory, "cores": str(60 // vgpus)}}
    assert (found["count"], found["allocationMode"], found["deviceClassName"]) == (vgpus, "ExactCount", "vgpu.aliquot.dev")


def test_request_without_amounts_is_whole_gpu():
    assert "capacity" not in exactly(asked())
    assert exactly(asked(mib=81920), isolation=Isolation.EXCLUSIVE) == {
        "deviceClassName": "gpu.aliquot.dev", "allocationMode": "ExactCount", "count": 1,
    }  # fmt: skip


def test_equal_shapes_have_one_name_and_others_have_their_own():
    shapes = [asked(), asked(2), asked(mib=1), asked(mib=2), asked(cores=1)]
    names = {template_of(one, Preferences()).name for one in shapes}
    names |= {
        template_of(asked(), preferences).name for preferences in (Preferences(gpu_type=("H20",)), Preferences(priority=Priority.LOW))
    }
    assert len(names) == len(shapes) + 2
    assert all(is_ours(name) and len(name) <= 63 for name in names)
    assert template_of(ContainerRequest("other", 1), Preferences()).name == template_of(asked(), Preferences()).name


def test_parameters_are_those_that_the_agent_reads():
    preferences = Preferences(priority=Priority.HIGH, cores_mode=CoresMode.WEIGHT, memory_burst=1.5)
    config = template_of(asked(), preferences).spec["devices"]["config"][0]
    assert config["opaque"]["driver"] == "gpu.aliquot.dev"
    assert preferences_of([msgspec.json.encode(config["opaque"]["parameters"])]) == preferences


def test_several_gpus_with_strict_numa_are_on_one_node():
    strict = template_of(asked(2), Preferences(numa=NumaMode.STRICT)).spec["devices"]
    assert strict["constraints"] == [{"requests": ["vgpu"], "matchAttribute": "resource.kubernetes.io/numaNode"}]
    assert "constraints" not in template_of(asked(1), Preferences(numa=NumaMode.STRICT)).spec["devices"]


def test_models_and_uuids_become_conditions_with_quoted_texts():
    found = exactly(asked(), gpu_type=("H20", "=NVIDIA A10"), gpu_type_not=("L4*",), gpu_uuid=('GPU-"1',), gpu_uuid_not=("GPU-2",))
    expressions = [one["cel"]["expression"] for one in found["selectors"]]
    product = "device.attributes['gpu.aliquot.dev'].productName.matches"
    assert expressions[0].count(product) == 2
    assert expressions[1].startswith(f"!{product}")
    assert expressions[2:] == [
        'device.attributes[\'gpu.aliquot.dev\'].uuid in ["GPU-\\"1"]',
        "!(device.attributes['gpu.aliquot.dev'].uuid in [\"GPU-2\"])",
    ]


@pytest.mark.parametrize(
    ("request_", "preferences", "sentence"),
    [
        pytest.param(asked(0, mig=(("1g.10gb", 1),)), {}, "MIG instances", id="MIG"),
        pytest.param(asked(memory_percent=50), {}, "write MiB", id="percentage"),
        pytest.param(asked(), {"isolation": Isolation.MPS}, "write shim or exclusive", id="MPS"),
        pytest.param(asked(), {"paused": True}, "remove it", id="paused"),
    ],
)
def test_what_a_claim_cannot_state_is_refused_with_cure(request_, preferences, sentence):
    with pytest.raises(RequestError, match=sentence):
        template_of(request_, Preferences(**preferences))


def test_content_is_equal_with_what_the_api_adds_and_nothing_else():
    spec = template_of(asked(2, 2048), Preferences(gpu_uuid=("GPU-1",))).spec
    stored = copy.deepcopy(spec)
    stored["devices"]["requests"][0]["exactly"]["tolerationsOfLaterVersions"] = []
    assert has_content(stored, spec)
    stored["devices"]["requests"][0]["exactly"]["capacity"]["requests"]["memory"] = "80Gi"
    assert not has_content(stored, spec)
    assert not has_content(None, spec)
    doubled = copy.deepcopy(spec)
    doubled["devices"]["requests"].append(doubled["devices"]["requests"][0])
    assert not has_content(doubled, spec)


def test_template_is_touched_long_before_it_is_old():
    assert TOUCH_SECONDS * 2 < KEEP_SECONDS
    assert not is_due(0.0, TOUCH_SECONDS)
    assert is_due(0.0, TOUCH_SECONDS + 1)
    assert not is_old(0.0, KEEP_SECONDS)
    assert is_old(0.0, KEEP_SECONDS + 1)
