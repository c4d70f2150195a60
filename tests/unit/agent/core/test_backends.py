# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.backends import Abilities, MigStrategy, backend_of, backend_trouble, offer_of
from agent.core.driver_limits import limit_edits
from agent.core.mps import client_edits
from aliquot.contract.features import FeatureGates, Gate
from aliquot.contract.model import ContainerRequest, Isolation, Preferences
from aliquot.contract.units import MIB
from tests.unit.agent.builders import gpu, instance, inventory, share

EVERYTHING = Abilities(without_mps="", without_driver_limits="", most_memory_burst=2.0)
SHARED, PARTITIONED = gpu(0), gpu(1, mig=[instance(1, 0)])


def driver(version: str, *devices):
    return replace(inventory(*devices), driver_version=version, has_cgroup_limits=version.startswith("615"))


def ask(vgpus: int = 1, mib: int | None = 100, cores: int | None = None) -> ContainerRequest:
    return ContainerRequest("main", vgpus, None if mib is None else mib * MIB, cores)


class TestOffer:
    def test_a_node_with_all_it_needs_offers_every_backend(self):
        assert set(offer_of(driver("615.10", SHARED, PARTITIONED), EVERYTHING).backends) == set(Isolation)

    def test_without_other_backends_only_shim_and_exclusive_exist(self):
        assert offer_of(driver("580.159.03", SHARED), Abilities()).backends == (Isolation.SHIM, Isolation.EXCLUSIVE)

    @pytest.mark.parametrize(
        ("on", "abilities", "backend", "words"),
        [
            (driver("615.10", PARTITIONED), EVERYTHING, Isolation.SHIM, "every GPU of this node is in MIG mode"),
            (driver("615.10", PARTITIONED), EVERYTHING, Isolation.MPS, "every GPU of this node is in MIG mode"),
            (driver("615.10", SHARED), EVERYTHING, Isolation.MIG, "no GPU of this node is in MIG mode"),
            (driver("615.10", PARTITIONED), replace(EVERYTHING, mig_strategy=MigStrategy.NONE), Isolation.MIG, "migStrategy: none"),
            (driver("580.1", SHARED), EVERYTHING, Isolation.DRIVER, "driver 580 has no memory limits of its own, only drivers from 615"),
            (driver("", SHARED), EVERYTHING, Isolation.DRIVER, "no memory limits of its own"),
            (
                replace(driver("615.10", SHARED), has_cgroup_limits=False),
                EVERYTHING,
                Isolation.DRIVER,
                "NVML of driver 615.10 has no calls",
            ),
            (driver("615.10", SHARED), replace(EVERYTHING, without_mps="no program"), Isolation.MPS, "no program"),
            (driver("615.10", SHARED), replace(EVERYTHING, without_driver_limits="no hook"), Isolation.DRIVER, "no hook"),
        ],
    )
    def test_missing_requirement_is_reported(self, on, abilities, backend, words):
        offer = offer_of(on, abilities)
        assert backend not in offer.backends
        assert words in offer.lacking[backend]


class TestTrouble:
    def trouble(self, request: ContainerRequest, most_burst: float = 1.0, **preferences) -> str:
        return backend_trouble(request, Preferences(**preferences), offer_of(driver("615.10", SHARED), EVERYTHING), most_burst)

    @pytest.mark.parametrize(
        ("preferences", "gate"),
        [(Preferences(paused=True), Gate.PAUSING), (Preferences(memory_burst=1.5), Gate.MEMORY_BURST)],
        ids=["paused", "burst"],
    )
    def test_closed_gate_is_named_in_the_refusal(self, preferences, gate):
        closed = replace(EVERYTHING, gates=FeatureGates(frozenset(Gate) - {gate}))
        trouble = backend_trouble(ask(), preferences, offer_of(driver("615.10", SHARED), closed), 2.0)
        assert f"is not available on this node: the alpha feature {gate} is off: set featureGates: {gate}=true" in trouble
        assert backend_trouble(ask(), preferences, offer_of(driver("615.10", SHARED), EVERYTHING), 2.0) == ""

    @pytest.mark.parametrize("isolation", [None, Isolation.SHIM, Isolation.MPS, Isolation.DRIVER])
    def test_offered_backend_has_no_trouble(self, isolation):
        assert self.trouble(ask(), isolation=isolation) == ""

    def test_unavailable_backend_is_refused_with_reason_and_offered_ones(self):
        sentence = self.trouble(ContainerRequest("main", mig=(("1g.10gb", 1),)))
        assert "mig is not available on this node: no GPU of this node is in MIG mode. It offers shim, mps, driver, exclusive." in sentence

    def test_mps_gives_one_gpu(self):
        assert "requests 2. Request one vGPU" in self.trouble(ask(vgpus=2), isolation=Isolation.MPS)

    def test_the_driver_limits_no_cores(self):
        assert "Remove nvidia.com/vgpu-cores" in self.trouble(ask(cores=50), isolation=Isolation.DRIVER)

    @pytest.mark.parametrize(
        ("burst", "most", "refused"), [(1.5, 1.5, False), (1.5, 1.4, True), (1.1, 1.0, True), (1.0, 1.0, False), (None, 1.0, False)]
    )
    def test_burst_is_refused_above_the_nodes_maximum(self, burst, most, refused):
        assert bool(self.trouble(ask(), most, memory_burst=burst)) is refused

    def test_refused_burst_names_the_allowed_maximum(self):
        assert "allows at most 1.4" in self.trouble(ask(), 1.4, memory_burst=1.5)
        assert "allows no burst" in self.trouble(ask(), 1.0, memory_burst=1.5)

    @pytest.mark.parametrize("isolation", [Isolation.MPS, Isolation.DRIVER, Isolation.EXCLUSIVE])
    def test_only_the_shim_pauses_a_container(self, isolation):
        assert f"needs isolation: shim, but container main has {isolation}" in self.trouble(ask(), paused=True, isolation=isolation)
        assert self.trouble(ask(), isolation=isolation) == self.trouble(ask(), paused=True) == ""

    def test_only_the_shim_lets_a_container_burst(self):
        assert "needs isolation: shim" in self.trouble(ask(), 2.0, memory_burst=1.5, isolation=Isolation.MPS)


def test_the_backend_follows_from_the_request_and_the_annotation():
    assert backend_of(ask(), Preferences()) is Isolation.SHIM
    assert backend_of(ask(), Preferences(isolation=Isolation.EXCLUSIVE)) is Isolation.EXCLUSIVE
    assert backend_of(ContainerRequest("main", mig=(("1g.10gb", 1),)), Preferences()) is Isolation.MIG


def test_an_mps_client_has_its_memory_pinned_and_its_threads_limited():
    edits = client_edits(share(0, 4096, 30), "/host/pipe", "/host/shm")
    assert edits["env"] == [
        "CUDA_MPS_PIPE_DIRECTORY=/run/aliquot/mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
    ]
    assert [(mount["hostPath"], mount["containerPath"]) for mount in edits["mounts"]] == [
        ("/host/pipe", "/run/aliquot/mps"),
        ("/host/shm", "/dev/shm"),
    ]


def test_an_mps_client_without_cores_may_use_all_threads():
    assert not any("THREAD" in entry for entry in client_edits(share(0), "/p", "/s")["env"])


def test_the_drivers_limit_is_applied_to_every_gpu_of_the_container():
    edits = limit_edits([share(0, 2048), share(1, 2048)], "/usr/bin/nvidia-cdi-hook")
    assert edits["env"] == ["NVIDIA_GPU_MEMORY_LIMIT=2048", "NVIDIA_GPU_MEMORY_REQUEST=0"]
    (hook,) = edits["hooks"]
    assert hook["hookName"] == "createRuntime"
    assert hook["args"] == ["nvidia-cdi-hook", "apply-cuda-memory-limits", "--gpu-id", "GPU-0", "--gpu-id", "GPU-1"]
