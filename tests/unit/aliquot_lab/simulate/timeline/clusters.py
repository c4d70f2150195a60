# SPDX-License-Identifier: Apache-2.0
"""Random clusters and pods for the tests of the simulation, and its invariants, computed from the placements alone."""

from collections import Counter, defaultdict

from hypothesis import strategies as st

from aliquot_lab.simulate.timeline.model import PodKind, Queue, SimNode, SimPod
from aliquot_lab.simulate.timeline.outcome import End
from aliquot_lab.simulate.timeline.run import Setting, Simulation

GPU_MIB = 80_000
LAYOUTS = ((), (), (), ("on-demand",), ("3g.40gb", "2g.20gb", "1g.10gb"))
PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb")
QUEUES = (Queue("a", 2000), Queue("b", 3000, borrow_milli=1000, reclaims=True))


def node(name="n", *, cpu=64_000, ram=64_000, gpus=8, mig=(), model="", shares=16):
    return SimNode(name, cpu, ram, gpus, GPU_MIB, model, mig, shares)


def pod(name, *, at=0.0, lasts=10.0, priority=0, queue="", gang="", **kind):
    return SimPod(name, PodKind(**({"gpus": 1} | kind)), at, lasts, priority, queue, gang)


def share(memory=40_000, cores=50):
    return {"memory_mib": memory, "cores_percent": cores, "shared": True}


@st.composite
def node_lists(draw, *, mig=True):
    layouts = LAYOUTS if mig else ((),)
    nodes = [
        node(
            f"n{number}",
            cpu=draw(st.sampled_from([2000, 8000])),
            ram=8000,
            gpus=draw(st.integers(0, 4)),
            mig=draw(st.sampled_from(layouts)),
        )
        for number in range(draw(st.integers(1, 4)))
    ]
    return [*nodes, node("last", cpu=8000, ram=8000, gpus=draw(st.integers(1, 4)))]


@st.composite
def kinds(draw, *, mig=True):
    host = {"cpu_milli": draw(st.sampled_from([0, 500, 3000])), "ram_mib": draw(st.sampled_from([0, 1000, 5000]))}
    match draw(st.sampled_from(["none", "share", "share", "whole", "whole", *(["mig"] if mig else [])])):
        case "none":
            return PodKind(**host)
        case "mig":
            return PodKind(**host, mig=draw(st.sampled_from(PROFILES)))
        case "whole":
            return PodKind(**host, gpus=draw(st.integers(1, 4)))
    memory, cores = draw(st.sampled_from([20_000, 40_000, 60_000])), draw(st.sampled_from([None, 20, 50, 80]))
    amount = draw(st.sampled_from([{"memory_mib": memory}, {"memory_percent": memory // 1000}]))
    return PodKind(**host, gpus=draw(st.integers(1, 2)), cores_percent=cores, shared=True, **amount)


@st.composite
def pod_lists(draw, *, gangs=True, queues=True, mig=True):
    pods = []
    for number in range(draw(st.integers(1, 20))):
        kind, members = draw(kinds(mig=mig)), draw(st.integers(1, 3)) if gangs else 1
        queue = draw(st.sampled_from(["", "a", "b"])) if queues else ""
        at, lasts = float(draw(st.integers(0, 20))), draw(st.sampled_from([None, 0.0, 1.0, 5.0, 20.0]))
        gang = f"g{number}" if members > 1 and kind.has_gpu else ""
        priority = draw(st.integers(0, 2))
        pods += [SimPod(f"p{number}-{member}", kind, at, lasts, priority, queue, gang) for member in range(members if gang else 1)]
    return pods


def settings_of(*, gangs=True, queues=True, mig=True):
    pods = pod_lists(gangs=gangs, queues=queues, mig=mig)
    return st.builds(Setting, node_lists(mig=mig), pods, st.just(QUEUES), st.integers(0, 3), st.booleans())


class Watcher:
    """Checks the invariants after every moment."""

    def __init__(self):
        self.moments = 0

    def __call__(self, simulation: Simulation) -> None:
        self.moments += 1
        self.no_device_is_given_twice(simulation)
        self.no_host_is_given_twice(simulation)
        self.gangs_run_whole_or_not(simulation)
        self.quotas_hold(simulation)

    def no_device_is_given_twice(self, simulation):
        memory, cores, shares = Counter[str](), Counter[str](), Counter[str]()
        for placement in simulation.cluster.running.values():
            for container in placement.assignment.containers if placement.assignment else ():
                for given in container.shares:
                    memory[given.device_uuid] += given.memory_bytes // 2**20
                    cores[given.device_uuid] += given.cores_percent or 0
                    shares[given.device_uuid] += 1
        for gpu in simulation.cluster.state.gpu_nodes():
            for entry in gpu.devices:
                uuid, instances = entry.device.uuid, entry.device.mig_instances
                assert memory[uuid] <= GPU_MIB
                assert cores[uuid] <= 100
                assert shares[uuid] <= gpu.shares_per_gpu
                used = [instance for instance in instances if shares[instance.uuid]]
                assert all(shares[instance.uuid] == 1 for instance in used)
                assert not any(a.overlaps(b) for a in used for b in used if a is not b)

    def no_host_is_given_twice(self, simulation):
        cpu, ram = Counter[str](), Counter[str]()
        for placement in simulation.cluster.running.values():
            cpu[placement.node] += placement.pod.kind.cpu_milli
            ram[placement.node] += placement.pod.kind.ram_mib
        for name, known in simulation.cluster.nodes.items():
            assert cpu[name] <= known.cpu_milli
            assert ram[name] <= known.ram_mib

    def gangs_run_whole_or_not(self, simulation):
        running = simulation.cluster.running
        for workload in simulation.workloads:
            count = sum(simulation.cluster.uid_of(member) in running for member in workload.pods)
            assert count == (len(workload.pods) if simulation.state_of(workload) is End.RUNNING else 0)

    def quotas_hold(self, simulation):
        used = simulation.quotas.used_milli()
        assert sum(used.values()) <= sum(queue.quota_milli for queue in simulation.setting.queues)
        for queue in simulation.setting.queues:
            assert used[queue.name] >= 0
            assert queue.borrow_milli is None or used[queue.name] <= queue.quota_milli + queue.borrow_milli


def could_give_way(simulation, workload):
    """Whether one pod would fit on a node without the pods of lower priority there: a search that shares no code with the product's."""
    (wanted,) = workload.pods
    return any(_fits(simulation, known, wanted) for known in simulation.cluster.nodes.values())


def _fits(simulation, known, wanted):
    staying = [
        placement
        for placement in simulation.cluster.running.values()
        if placement.node == known.name and placement.pod.priority >= wanted.priority
    ]
    if known.cpu_milli - sum(placement.pod.kind.cpu_milli for placement in staying) < wanted.kind.cpu_milli:
        return False
    if known.ram_mib - sum(placement.pod.kind.ram_mib for placement in staying) < wanted.kind.ram_mib:
        return False
    return _free_gpus(simulation, known, staying, wanted.kind) >= wanted.kind.gpus


def _free_gpus(simulation, known, staying, kind):
    held = defaultdict(list)
    for placement in staying:
        for container in placement.assignment.containers if placement.assignment else ():
            for given in container.shares:
                held[given.device_uuid].append(given)
    return sum(_takes(held[entry.device.uuid], kind) for entry in simulation.cluster.state.gpu_node(known.name).devices)


def _takes(held, kind):
    memory = GPU_MIB - sum(given.memory_bytes // 2**20 for given in held)
    cores = 100 - sum(given.cores_percent or 0 for given in held)
    without_cores = sum(given.cores_percent is None for given in held)
    wanted = GPU_MIB * (kind.memory_percent or 100) // 100 if kind.memory_mib is None else kind.memory_mib
    if wanted > memory:
        return False
    return cores - without_cores >= 1 if kind.cores_percent is None else cores - without_cores >= kind.cores_percent
