# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot.contract.model import Isolation, NumaMode, Preferences
from aliquot.placement.device import DeviceState
from aliquot.placement.fit import Reject
from aliquot.placement.refusal import DeviceReject, describe_request, refuse
from tests.unit.aliquot.placement.builders import ANYTHING, ask, ask_mig, make_device, make_instance, make_states, share

EXCLUSIVE = Preferences(isolation=Isolation.EXCLUSIVE)


@pytest.mark.parametrize(
    ("request_", "preferences", "want"),
    [
        (ask(mib=2048, cores=50), ANYTHING, "1 vGPU with 2 GiB and 50 percent of the cores"),
        (ask(2, mib=100), ANYTHING, "2 vGPUs with 100 MiB each"),
        (ask(1, mib=None), ANYTHING, "1 vGPU with all the memory of a GPU"),
        (ask(2, mib=None), EXCLUSIVE, "2 whole GPUs for itself"),
        (ask(1, mib=1), EXCLUSIVE, "1 whole GPU with 1 MiB for itself"),
        (ask(2, mib=1024), EXCLUSIVE, "2 whole GPUs with 1 GiB each for itself"),
        (ask_mig(("1g.10gb", 2), ("2g.20gb", 1)), ANYTHING, "2 x MIG 1g.10gb and 1 x MIG 2g.20gb"),
    ],
)
def test_a_request_is_described_per_vgpu(request_, preferences, want):
    assert describe_request(request_, preferences) == want


def test_refusal_states_request_free_amount_and_action():
    states = [*make_states(2, share(0, mib=950), share(1, mib=990)), DeviceState.of(make_device(2), cordoned=True)]
    refusal = refuse(states, ask(mib=100), ANYTHING)
    assert refusal.reason is Reject.MEMORY
    assert refusal.by_device == (
        DeviceReject("GPU-0", Reject.MEMORY),
        DeviceReject("GPU-1", Reject.MEMORY),
        DeviceReject("GPU-2", Reject.CORDONED),
    )
    assert refusal.sentence == (
        "container main asks for 1 vGPU with 100 MiB; 0 of 3 GPUs fit: 1 cordoned, "
        "2 without enough free memory (at most 50 MiB of 1000 MiB, on GPU-0). "
        "Ask for less nvidia.com/vgpu-memory, or wait for a container there to end."
    )


@pytest.mark.parametrize(
    ("states", "request_", "preferences", "reason", "says"),
    [
        pytest.param([], ask(), ANYTHING, Reject.COUNT, "this node has no GPU", id="no GPU"),
        pytest.param(make_states(2), ask(3), ANYTHING, Reject.COUNT, "2 of 2 GPUs fit. Ask for fewer vGPUs", id="too few GPUs"),
        pytest.param(
            make_states(2, share(0, mib=990)),
            ask(2),
            ANYTHING,
            Reject.MEMORY,
            "1 of 2 GPUs fit: 1 without enough free memory",
            id="one of two",
        ),
        pytest.param(
            make_states(1, share()), ask(mib=None), ANYTHING, Reject.MEMORY, "to ask for a part of a GPU's memory", id="whole memory"
        ),
        pytest.param(
            make_states(1, share(cores=80)), ask(cores=30), ANYTHING, Reject.CORES, "at most 20 of 100 percent, on GPU-0", id="cores"
        ),
        pytest.param(make_states(1, share(cores=100)), ask(), ANYTHING, Reject.CORES, "all cores are reserved", id="no cores to share"),
        pytest.param(
            make_states(1), ask(), Preferences(gpu_type=("A100",)), Reject.TYPE, "(NVIDIA H200). Change aliquot.dev/gpu-type", id="type"
        ),
        pytest.param(make_states(1), ask(), Preferences(gpu_uuid=("x",)), Reject.UUID, "Change aliquot.dev/gpu-uuid", id="uuid"),
        pytest.param(make_states(1, share(), max_shares=1), ask(), ANYTHING, Reject.SHARES, "sharesPerGpu", id="shares"),
        pytest.param(make_states(1, healthy=False), ask(), ANYTHING, Reject.UNHEALTHY, "Wait for the device to recover", id="unhealthy"),
        pytest.param(
            make_states(1, share()),
            ask(mib=None),
            EXCLUSIVE,
            Reject.EXCLUSIVE,
            "used by other containers",
            id="exclusive",
        ),
        pytest.param(
            [DeviceState.of(make_device(mig=(make_instance(0, 0),)))],
            ask(),
            ANYTHING,
            Reject.MIG_MODE,
            "nvidia.com/mig-<profile>",
            id="MIG mode",
        ),
        pytest.param(make_states(1), ask_mig(("1g.10gb", 1)), ANYTHING, Reject.MIG_PROFILE, "1 without a free instance", id="no instance"),
        pytest.param(
            [DeviceState.of(make_device(mig=(make_instance(0, 0),)))],
            ask_mig(("1g.10gb", 2)),
            ANYTHING,
            Reject.MIG_PROFILE,
            "administrator",
            id="few",
        ),
    ],
)
def test_the_reason_that_weighs_most_names_the_cure(states, request_, preferences, reason, says):
    refusal = refuse(states, request_, preferences)
    assert refusal.reason is reason
    assert says in refusal.sentence


def test_whole_gpu_below_its_memory_is_refused_with_its_size():
    states = [*make_states(1, share()), DeviceState.of(make_device(1, mib=2000)), DeviceState.of(make_device(2), cordoned=True)]
    refusal = refuse(states, ask(mib=999), EXCLUSIVE)
    assert refusal.reason is Reject.MEMORY
    assert refusal.sentence == (
        "container main asks for 1 whole GPU with 999 MiB for itself; 0 of 3 GPUs fit: 1 cordoned, "
        "2 with more memory than that (at least 1000 MiB, GPU-0). "
        "Recreate the pod with all the memory of such a GPU as nvidia.com/vgpu-memory, or without that resource, because "
        "aliquot.dev/isolation: exclusive gives whole GPUs; or without that annotation."
    )


def test_a_numa_refusal_says_how_many_devices_each_node_has():
    states = [*make_states(4, numa_nodes=2), DeviceState.of(make_device(4, numa=None))]
    refusal = refuse(states, ask(3), Preferences(numa=NumaMode.STRICT), Reject.NUMA)
    assert (
        "but only 2 on NUMA node 0, 2 on NUMA node 1, 1 on an unknown NUMA node. Ask for fewer vGPUs, or set aliquot.dev/numa: prefer"
        in refusal.sentence
    )


def test_every_reason_has_words():
    for reject in Reject:
        assert refuse(make_states(2), ask(), ANYTHING, reject).sentence.endswith(".")
