# SPDX-License-Identifier: Apache-2.0
"""The sizes of GPUs that the webhook reckons parts of a GPU by."""

import pytest

from aliquot.contract.model import Preferences
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.columnar import device_sizes
from tests.unit.scheduler_plugin.builders import make_device, make_node


@pytest.mark.parametrize(
    ("preferences", "sizes"),
    [
        pytest.param({}, {1000, 2000, 3000}, id="all that are no MIG parents"),
        pytest.param({"gpu_type": ("h200",)}, {1000, 2000}, id="a type"),
        pytest.param({"gpu_type_not": ("H200",)}, {3000}, id="all but a type"),
        pytest.param({"gpu_uuid": ("gpu-big-0", "GPU-other-0")}, {2000, 3000}, id="by UUID"),
        pytest.param({"gpu_uuid_not": ("GPU-big-0",)}, {1000, 3000}, id="all but a UUID"),
        pytest.param({"gpu_uuid": ("GPU-big-0",), "gpu_type": ("L40S",)}, set(), id="nothing is both"),
    ],
)
def test_the_sizes_are_those_of_the_gpus_that_the_pod_wants(preferences, sizes):
    state = ClusterState()
    state.set_gpu_node(make_node("small", 2))
    state.set_gpu_node(make_node("big", [make_device("big", 0, mib=2000)]))
    state.set_gpu_node(make_node("other", [make_device("other", 0, mib=3000, model="NVIDIA L40S")]))
    state.set_gpu_node(make_node("mig", [make_device("mig", 0, mib=4000, instances=1)]))
    state.set_gpu_node(make_node("gone", [make_device("gone", 0, mib=5000)]))
    state.drop_gpu_node("gone")
    assert device_sizes(state.columns, Preferences(**preferences)) == sizes


def test_without_a_gpu_there_is_no_size():
    assert device_sizes(ClusterState().columns, Preferences()) == set()
