# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot.contract.model import Preferences
from aliquot.placement.demand import Shape
from aliquot.placement.device import DeviceState
from aliquot.placement.fit import Reject, reject_reason
from aliquot.placement.model_name import is_name, matches
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.columnar import device_sizes
from tests.unit.aliquot.placement.builders import ask
from tests.unit.scheduler_plugin.builders import make_device, make_node

MODELS = (
    "NVIDIA H200", "NVIDIA H20", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA A10", "NVIDIA A10G", "NVIDIA L4", "NVIDIA L40",
    "NVIDIA L40S", "Tesla V100-SXM2-16GB", "Tesla T4", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D", "NVIDIA RTX A6000",
)  # fmt: skip

MEANT = {
    "H20": ["NVIDIA H20"],
    "h200": ["NVIDIA H200"],
    "A10": ["NVIDIA A10"],
    "L4": ["NVIDIA L4"],
    "l40": ["NVIDIA L40"],
    "A100": ["NVIDIA A100-SXM4-80GB"],
    "NVIDIA-A100": ["NVIDIA A100-SXM4-80GB"],
    "80GB": ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"],
    "V100": ["Tesla V100-SXM2-16GB"],
    "RTX 4090": ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D"],
    "A10*": ["NVIDIA A100-SXM4-80GB", "NVIDIA A10", "NVIDIA A10G"],
    "*4*0*": ["NVIDIA A100-SXM4-80GB", "NVIDIA L40", "NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D"],
    "*H20*": ["NVIDIA H200", "NVIDIA H20"],
    "*40S": ["NVIDIA L40S"],
    "GeForce*D": ["NVIDIA GeForce RTX 4090 D"],
    "*": list(MODELS),
    "=NVIDIA GeForce RTX 4090": ["NVIDIA GeForce RTX 4090"],
    "=NVIDIA-A100-SXM4-80GB": ["NVIDIA A100-SXM4-80GB"],
    "=H20": [],
    "=*": [],
    "-": [],
}


@pytest.mark.parametrize("name", MEANT)
def test_name_means_the_models_with_its_words(name):
    assert [model for model in MODELS if matches(name, model)] == MEANT[name]


@pytest.mark.parametrize("name", MEANT)
@pytest.mark.parametrize("model", MODELS)
def test_three_places_that_match_names_agree(name, model):
    wanted = matches(name, model)
    device, state = make_device("n", 0, model=model), ClusterState()
    state.set_gpu_node(make_node("n", [device]))
    for preferences, allowed in ((Preferences(gpu_type=(name,)), wanted), (Preferences(gpu_type_not=(name,)), not wanted)):
        shape = Shape(gpu_type=preferences.gpu_type, gpu_type_not=preferences.gpu_type_not)
        assert (reject_reason(DeviceState.of(device), ask(), preferences) is not Reject.TYPE) == allowed
        assert bool(device_sizes(state.columns, preferences)) == allowed
        assert shape.wants(model) == allowed


@pytest.mark.parametrize(("text", "named"), [("H20", True), ("*", True), ("=H20", True), ("-", False), ("=", False), ("=*", False)])
def test_text_without_a_word_or_star_is_no_name(text, named):
    assert is_name(text) == named


def test_many_stars_are_decided_in_one_pass():
    assert not matches("*a" * 5000, "a" * 60)
    assert matches("*a" * 60, "a" * 60)
