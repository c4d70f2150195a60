from dataclasses import replace

import pytest

from agent.core.backends import Abilities, MigStrategy, backend_of, backend_trouble, offer_of
from agent.core.driver_limits import limit_edits
from agent.core.mps import client_edits
from proto.model import ContainerRequest, Isolation, Preferences
from proto.units import MIB
from tests.unit.agent.builders import board, gpu, instance, share

EVERYTHING = Abilities(without_mps="", without_driver_limits="", most_memory_burst=2.0)
SHARED, PARTITIONED = gpu(0), gpu(1, mig=[instance(1, 0)])


def driver(version: str, *devices):
    return replace(board(*devices), driver_version=version, has_cgroup_limits=version.startswith("615"))


def ask(vgpus: int = 1, mib: int | None = 100, cores: int | None = None) -> ContainerRequest:
    return ContainerRequest("main", vgpus, None if mib is None else mib * MIB, cores)


class TestOffer:
    def test_a_node_with_all_it_needs_offers_every_backend(self):
        assert set(offer_of(driver("615.10", SHARED, PARTITIONED), EVERYTHING).backends) == set(Isolation)

    def test_without_anything_beside_the_driver_there_are_shim_and_exclusive(self):
        assert offer_of(driver("580.159.03", SHARED), Abilities()).backends == (Isolation.SHIM, Isolation.EXCLUSIVE)

    @pytest.mark.parametrize(
        ("on", "abilities", "backend", "words"),
        [
            (driver("615.10", PARTITIONED), EVERYTHING, Isolation.SHIM, "every GPU of this node is in MIG mode"),
            (driver("615.10", PARTITIONED), EVERYTHING, Isolation.MPS, "every GPU of this node is in MIG mode"),
            (driver("615.10", SHARED), EVERYTHING, Isolation.MIG, "no GPU of this node is in MIG mode"),
            (driver("615.10", PARTITIONED), replace(EVERYTHING, mig_strategy=MigStrategy.NONE), Isolation.MIG, "migStrategy is none"),
            (driver("580.1", SHARED), EVERYTHING, Isolation.DRIVER, "driver 580 has no limits of its own, 615"),
            (driver("", SHARED), EVERYTHING, Isolation.DRIVER, "no limits of its own"),
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
    def test_what_is_lacking_is_said(self, on, abilities, backend, words):
        offer = offer_of(on, abilities)
        assert backend not in offer.backends
        assert words in offer.lacking[backend]


class TestTrouble:
    def trouble(self, request: ContainerRequest, most_burst: float = 1.0, **preferences) -> str:
        return backend_trouble(request, Preferences(**preferences), offer_of(driver("615.10", SHARED), EVERYTHING), most_burst)

    @pytest.mark.parametrize("isolation", [None, Isolation.SHIM, Isolation.MPS, Isolation.DRIVER])
    def test_what_is_offered_is_no_trouble(self, isolation):
        assert self.trouble(ask(), isolation=isolation) == ""

    def test_what_is_not_offered_is_refused_with_the_reason_and_what_is(self):
        sentence = self.trouble(ContainerRequest("main", mig=(("1g.10gb", 1),)))
        assert "mig is not available on this node: no GPU of this node is in MIG mode. It offers shim, mps, driver, exclusive." in sentence

    def test_mps_gives_one_gpu(self):
        assert "asks for 2. Ask for one vGPU" in self.trouble(ask(vgpus=2), isolation=Isolation.MPS)

    def test_the_driver_limits_no_cores(self):
        assert "Remove nvidia.com/vgpu-cores" in self.trouble(ask(cores=50), isolation=Isolation.DRIVER)

    @pytest.mark.parametrize(
        ("burst", "most", "refused"), [(1.5, 1.5, False), (1.5, 1.4, True), (1.1, 1.0, True), (1.0, 1.0, False), (None, 1.0, False)]
    )
    def test_a_burst_is_for_nodes_that_allow_it(self, burst, most, refused):
        assert bool(self.trouble(ask(), most, memory_burst=burst)) is refused

    def test_a_refused_burst_says_what_is_allowed(self):
        assert "which is at most 1.4" in self.trouble(ask(), 1.4, memory_burst=1.5)
        assert "which is none" in self.trouble(ask(), 1.0, memory_burst=1.5)

    @pytest.mark.parametrize("isolation", [Isolation.MPS, Isolation.DRIVER, Isolation.EXCLUSIVE])
    def test_only_the_shim_pauses_a_container(self, isolation):
        assert f"is for isolation: shim, and container main has {isolation}" in self.trouble(ask(), paused=True, isolation=isolation)
        assert self.trouble(ask(), isolation=isolation) == self.trouble(ask(), paused=True) == ""

    def test_only_the_shim_lets_a_container_burst(self):
        assert "is for isolation: shim" in self.trouble(ask(), 2.0, memory_burst=1.5, isolation=Isolation.MPS)


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
