# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of a scheduling decision: filter, prioritize and bind of the extender on a loaded cluster, in process and over HTTP.

    python -m tests.bench.bench_extender [--nodes 5000] [--pods 50000] [--decisions 400] [--no-curve] [--json FILE]

The cluster is built as after a restart: the product's code decodes and applies lists of GpuNodes, nodes and pods in the API's JSON. Each
decision is a new pod (one of three shapes in turn). It goes through filter and prioritize with all node names, in a new order each time as
kube-scheduler sends them, and is then bound, so that every decision finds changed rows. Node names are as long as in a cloud. The API of
the binding replies immediately, so that only the extender's cost counts. Between two calls there is a pause, as with kube-scheduler. The
extender's work in the pause, for later calls, is measured too and counts in the pods per second. With ``--no-pause`` there is no pause.

It also measures rare work that delays all calls: the first decision on a shape of pod, preemption, and the search for waiting pods that now
fit. For work that yields to other calls, it also measures the longest time without a yield.

Every time is measured twice: as wall-clock time, which includes other work of the machine, and as CPU time of the process. The targets use
CPU time; for HTTP it is that of server and client together. Ends with 1 when a figure misses its target.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.gpunode import decode_gpu_node, encode_gpu_node
from aliquot.contract.model import ContainerAssignment, DeviceShare, PodAssignment
from aliquot.placement.request import pod_request
from scheduler_plugin.adapters.http import HttpServer
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.cooperative import IdleWorker, plan_ahead
from scheduler_plugin.extender.preempt import choose_victims
from scheduler_plugin.extender.prioritize import prioritize_nodes
from scheduler_plugin.services.retry import Retry
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.wiring.cluster import decode_host, decode_pod, settle_memory
from tests.bench.report import table
from tests.unit.scheduler_plugin.api import node_object, pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_device, make_node, make_pod

GPUS = 8
CURVE_NODES = (1000, 2000, 5000, 15_000)
CURVE_PODS_PER_NODE = 2
"""Equal at every size, so that the points of the curve differ only in the number of nodes."""
GPU_MIB = 143_771
PAUSE_SECONDS = 0.0005
"""Three pauses for each pod. Without an extender, kube-scheduler is expected to place 680 pods a second on 5,000 nodes (the threshold of
SchedulingBasic in its scheduler_perf), which is 1.5 ms for each."""
MANY_WAIT = 20_000
GANG_SIZE = 128
FORESEEN = "filter, foreseen"
SHAPES: tuple[dict[str, Any], ...] = (
    {"vgpu": "1", "vgpu_memory": "16000"},
    {"vgpu": "1", "vgpu_memory": "40000", "vgpu_cores": "30"},
    {"vgpu": "2", "vgpu_memory": "64000"},
)


class InstantApi:
    """An API that accepts every binding."""

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        return None

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        return None

    async def succeeded_pods(self, namespace: str) -> Sequence[PodFacts]:
        return ()

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        return None

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        return None


def node_name(index: int) -> str:
    return f"gpu-pool-{index:05d}.example.internal"


def recorded_lists(nodes: int, pods: int) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Return the lists that a restart reads. Pods have the size of real ones: 3 KiB of other fields."""
    rng = random.Random(1)
    filler = {"managedFields": [{"manager": "kubelet", "fieldsV1": {f"f:field-{i}": {} for i in range(80)}}]}
    inventories, hosts, pod_texts = [], [], []
    for index in range(nodes):
        name = node_name(index)
        devices = [make_device(f"{index:05d}", minor, mib=GPU_MIB, numa=minor // 4) for minor in range(GPUS)]
        inventories.append(encode_gpu_node(make_node(name, devices, linked=True)))
        hosts.append(json.dumps(node_object(name, "192", "2Ti")).encode())
    for index in range(pods):
        number, minor = rng.randrange(nodes), rng.randrange(GPUS)
        share = DeviceShare(f"GPU-{number:05d}-{minor}", rng.choice([8000, 16000, 40000]) * units.MIB, rng.choice([None, 5, 10]))
        uid = f"uid-{index}"
        text = codec.encode_assignment(PodAssignment(uid, (ContainerAssignment("main", (share,)),)))
        pod = pod_object(f"p-{index}", uid=uid, node=node_name(number), annotations={contract.ANNOTATION_ASSIGNMENT: text}, vgpu="1")
        pod["metadata"].update(filler)
        pod_texts.append(json.dumps(pod).encode())
    return inventories, hosts, pod_texts


def restart(lists: tuple[list[bytes], list[bytes], list[bytes]]) -> tuple[ExtenderContext, float, float]:
    """Build the state from lists; return it, and the seconds until it is ready as CPU time and wall-clock time."""
    begun, begun_cpu = time.perf_counter(), time.process_time()
    state = ClusterState()
    state.replace_gpu_nodes([decode_gpu_node(text) for text in lists[0]])
    hosts = [decode_host(msgspec.Raw(text)) for text in lists[1]]
    state.replace_hosts({host.name: host.amounts for host in hosts})
    state.replace_pods([decode_pod(msgspec.Raw(text)) for text in lists[2]])
    context = make_context(state, monotonic=time.monotonic)
    state.columns.derive()
    settle_memory()
    return context, time.process_time() - begun_cpu, time.perf_counter() - begun


def as_sent(names: list[str], workers: int = 16) -> list[str]:
    """Order names as kube-scheduler sends them: from its last position, by workers that take chunks in turn."""
    start, size = random.randrange(len(names)), int(len(names) ** 0.5) + 1
    rotated = names[start:] + names[:start]
    sent = []
    for at in range(0, len(names), workers * size):
        chunks = [iter(rotated[at + size * worker : at + size * (worker + 1)]) for worker in range(workers)]
        while chunks:
            chunk = random.choice(chunks)
            taken = list(islice(chunk, 8))
            sent += taken
            if not taken:
                chunks.remove(chunk)
    return sent


class Times:
    """Times of calls in seconds: wall-clock time, and CPU time of this process."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __enter__(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.wall.append(time.perf_counter() - self._begun[0])
        self.cpu.append(time.process_time() - self._begun[1])

    @classmethod
    def sum(cls, *parts: "Times") -> "Times":
        """Return the sums of several measurements, call by call."""
        total = cls()
        total.wall = [sum(seconds) for seconds in zip(*(part.wall for part in parts), strict=True)]
        total.cpu = [sum(seconds) for seconds in zip(*(part.cpu for part in parts), strict=True)]
        return total

    def figures(self) -> dict[str, float]:
        """Return the percentiles in milliseconds."""
        result = {}
        for clock, seconds in (("cpu", sorted(self.cpu)), ("wall", sorted(self.wall))):
            result[f"{clock}_p50_ms"] = round(1000 * statistics.median(seconds), 3)
            result[f"{clock}_p99_ms"] = round(1000 * seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))], 3)
        return result


class Pauses:
    """The pause between two calls."""

    def __init__(self, context: ExtenderContext, seconds: float) -> None:
        """Args: seconds: length of the pause; 0 means no pause and no work in it."""
        self._seconds = seconds
        self._desk = context
        self._worker = IdleWorker(self._prepare)
        self.pieces = Times()

    def _prepare(self) -> bool:
        with self.pieces:
            return self._desk.prepare()

    def called(self) -> None:
        """Note that a verb was called."""
        if self._seconds:
            self._worker.wake()

    async def pause(self) -> None:
        """Wait for the pause before the next call."""
        if self._seconds:
            await asyncio.sleep(self._seconds)


async def in_process(context: ExtenderContext, names: list[str], decisions: int, pause_seconds: float) -> dict[str, Any]:
    """Measure the verbs from request body to response body."""
    binder, between = Binder(context, InstantApi(), lambda: True), Pauses(context, pause_seconds)
    filtering, rating, binding = Times(), Times(), Times()
    for number in range(decisions):
        pod = pod_object(f"new-{number}", **SHAPES[number % len(SHAPES)])
        body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": as_sent(names)})
        with filtering:
            answer = filter_body(context, body, 0.0)
        body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": msgspec.json.decode(answer)["NodeNames"]})
        await between.pause()
        with rating:
            answer = prioritize_nodes(context, body)
        between.called()
        node = max(msgspec.json.decode(answer), key=lambda entry: entry["Score"])["Host"]
        context.state.set_pod(decode_pod(msgspec.Raw(msgspec.json.encode(pod))))
        args = {"PodName": pod["metadata"]["name"], "PodNamespace": "team", "PodUID": pod["metadata"]["uid"], "Node": node}
        await between.pause()
        with binding:
            result = await binder.bind(msgspec.json.encode(args))
        between.called()
        await between.pause()
        if result != b'{"Error":""}':
            raise RuntimeError(result.decode())
    verbs = {"filter": filtering, "prioritize": rating, "filter + prioritize": Times.sum(filtering, rating), "bind": binding}
    ahead = sum(between.pieces.cpu)
    return {
        "verbs": {verb: times.figures() for verb, times in verbs.items()},
        "between_ms": round(1000 * ahead / decisions, 3),
        "pods_per_cpu_second": round(decisions / (sum(Times.sum(filtering, rating, binding).cpu) + ahead)),
    }


async def over_http(context: ExtenderContext, names: list[str], decisions: int, pause_seconds: float) -> dict[str, float]:
    """Measure filter and prioritize as kube-scheduler sees them: keep-alive over loopback, server and client in one process."""
    between = Pauses(context, pause_seconds)

    async def filtered(body: bytes) -> bytes:
        return filter_body(context, body, 0.0)

    async def prioritized(body: bytes) -> bytes:
        return prioritize_nodes(context, body)

    server = HttpServer("127.0.0.1", 0, verbs={"/filter": filtered, "/prioritize": prioritized}, max_body_bytes=1 << 27)
    address = await server.start()
    filtering, rating = Times(), Times()
    async with aiohttp.ClientSession() as session:

        async def call(verb: str, times: Times, body: bytes) -> bytes:
            with times:
                async with session.post(f"http://{address}/{verb}", data=body) as response:
                    return await response.read()

        for number in range(decisions):
            pod = pod_object(f"http-{number}", **SHAPES[number % len(SHAPES)])
            body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": as_sent(names)})
            answer = await call("filter", filtering, body)
            await between.pause()
            body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": msgspec.json.decode(answer)["NodeNames"]})
            await call("prioritize", rating, body)
            between.called()  # by the client, which shares the loop with the server: for kube-scheduler it begins behind the answer
            await between.pause()
    await server.stop()
    return Times.sum(filtering, rating).figures()


def pod_of(name: str, containers: int = 1, priority: int = 0, **limits: Any) -> dict[str, Any]:
    """Return a pod with equal containers."""
    pod = pod_object(name, **limits)
    main = pod["spec"]["containers"][0]
    pod["spec"].update(priority=priority, containers=[{**main, "name": f"c{number}"} for number in range(containers)])
    return pod


async def rarely(context: ExtenderContext, names: list[str], repeats: int = 10) -> dict[str, dict[str, float]]:
    """Measure the work that is not part of every decision."""
    times: dict[str, Times] = defaultdict(Times)
    proposed = {name: {"Pods": [], "NumPDBViolations": 0} for name in names[: max(100, len(names) // 10)]}
    for number in range(repeats):
        for containers in (1, 2):
            pod = pod_of(f"new-shape-{containers}-{number}", containers, vgpu="1", vgpu_memory=str(9000 + number))
            body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": names})
            with times[f"filter, new shape, {containers} container{'s' * (containers > 1)}"]:
                filter_body(context, body, 0.0)
            foresee(context, f"foreseen-{containers}-{number}", containers, str(9500 + number), names, times)
        pod = pod_of(f"important-{number}", priority=1000, vgpu="2", vgpu_memory="280000")
        body = msgspec.json.encode({"Pod": pod, "NodeNameToVictims": None, "NodeNameToMetaVictims": proposed})
        with times[f"preempt, {len(proposed)} nodes"]:
            await choose_victims(context, body)
    kinds = 300
    for number in range(kinds):
        facts = decode_pod(msgspec.Raw(msgspec.json.encode(pod_of(f"waits-{number}", vgpu="1", vgpu_memory=str(2 * GPU_MIB + number)))))
        context.decisions.record(Decision(facts, pod_request(facts.gpu), 0.0, context.state.columns.change_count, 0, {}))
    retry = Retry(context, InstantApi(), lambda: True, lambda: 0.0, Telemetry())
    for number in range(repeats):
        node = context.state.gpu_node(names[number])
        context.state.set_gpu_node(replace(node, cordoned=True))
        with times[f"retry, {kinds} shapes wait"]:
            await retry.step()
    for number in range(MANY_WAIT):
        facts = make_pod(f"many-{number}", vgpu="1", vgpu_memory=str(2 * GPU_MIB + 2 * (number % 50)))
        context.decisions.record(Decision(facts, pod_request(facts.gpu), 0.0, context.state.columns.change_count, 0, {}))
    for number in range(repeats):
        context.state.set_gpu_node(replace(context.state.gpu_node(names[number]), cordoned=False))
        await note_pause(retry.step(), times[f"longest pause, retry, {MANY_WAIT} pods wait"])
        await note_pause(plan_gang(context, names, f"gang-{number}"), times[f"longest pause, plan of a gang of {GANG_SIZE}"])
    return {what: taken.figures() for what, taken in times.items()}


def foresee(context: ExtenderContext, name: str, containers: int, mib: str, names: list[str], times: dict[str, Times]) -> None:
    """Measure the same when the watch showed the pod early enough: the longest piece of work ahead, and the call."""
    pod = pod_of(name, containers, vgpu="1", vgpu_memory=mib)
    kind = f"new shape, {containers} container{'s' * (containers > 1)}"
    context.verdicts.expect(decode_pod(msgspec.Raw(msgspec.json.encode(pod))))

    pieces = Times()
    has_more = True
    while has_more:
        with pieces:
            has_more = context.prepare()
    times[f"longest piece ahead, {kind}"].wall.append(max(pieces.wall))
    times[f"longest piece ahead, {kind}"].cpu.append(max(pieces.cpu))
    body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": names})
    with times[f"{FORESEEN}, {kind}"]:
        filter_body(context, body, 0.0)


async def note_pause(work: Coroutine[None, None, None], times: Times) -> None:
    """Run a task; add the longest time without a yield."""
    pauses, task = Times(), asyncio.create_task(work)
    while not task.done():
        with pauses:
            await asyncio.sleep(0)
    await task
    times.wall.append(max(pauses.wall))
    times.cpu.append(max(pauses.cpu))


async def plan_gang(context: ExtenderContext, names: list[str], name: str) -> None:
    """Call filter for a member of a gang, and drop the gang."""
    annotations = {contract.ANNOTATION_GANG: name, contract.ANNOTATION_GANG_MIN: str(GANG_SIZE)}
    pods = [pod_object(f"{name}-{number}", annotations=annotations, **SHAPES[0]) for number in range(GANG_SIZE)]
    members = [decode_pod(msgspec.Raw(msgspec.json.encode(pod))) for pod in pods]
    for member in members:
        context.state.set_pod(member)
    await asyncio.sleep(0)
    body = msgspec.json.encode({"Pod": pods[0], "Nodes": None, "NodeNames": names})
    await asyncio.sleep(0)
    await plan_ahead(context, wire.decode_args(body))
    if not msgspec.json.decode(filter_body(context, body, 0.0))["NodeNames"]:
        raise RuntimeError(f"{name} has no place")
    for member in members:
        context.state.drop_pod(member.uid)
        context.decisions.forget(member.uid)


def measure(nodes: int, pods: int, decisions: int, pause_seconds: float) -> dict[str, Any]:
    """Measure one size of cluster."""
    context, ready_cpu, ready_wall = restart(recorded_lists(nodes, pods))
    names = [node_name(index) for index in range(nodes)]
    inside = asyncio.run(in_process(context, names, decisions, pause_seconds))
    return {
        "nodes": nodes,
        "gpus": nodes * GPUS,
        "pods": pods,
        "restart_to_ready_cpu_s": round(ready_cpu, 2),
        "restart_to_ready_s": round(ready_wall, 2),
        **inside,
        "over_http": asyncio.run(over_http(context, names, decisions, pause_seconds)),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rarely": asyncio.run(rarely(context, names)),
    }


def figures(result: dict[str, Any]) -> list[tuple[str, float, float | str, float]]:
    """Return the figures with a target at 5,000 nodes: CPU time, wall-clock time, and the target. That of foreseen shapes is for 20,000."""
    verbs, http = result["verbs"], result["over_http"]
    foreseen = [row for what, row in result["rarely"].items() if what.startswith(FORESEEN)]
    both, bind = verbs["filter + prioritize"], verbs["bind"]
    return [
        ("filter + prioritize, p50 ms", both["cpu_p50_ms"], both["wall_p50_ms"], 1.0),
        ("filter + prioritize, p99 ms", both["cpu_p99_ms"], both["wall_p99_ms"], 5.0),
        ("filter + prioritize over HTTP, p99 ms", http["cpu_p99_ms"], http["wall_p99_ms"], 8.0),
        ("bind, p99 ms", bind["cpu_p99_ms"], bind["wall_p99_ms"], 1.0),
        (f"{FORESEEN}, p99 ms", *(max(row[f"{clock}_p99_ms"] for row in foreseen) for clock in ("cpu", "wall")), 5.0),
        ("restart to ready, s", result["restart_to_ready_cpu_s"], result["restart_to_ready_s"], 10.0),
        ("memory, MiB", result["max_rss_mib"], "", 1024.0),
    ]


def show(result: dict[str, Any]) -> bool:
    """Print one size of cluster; return whether every target is met."""
    rows = [(name, value, wall, target, "yes" if value <= target else "no") for name, value, wall, target in figures(result)]
    busy = os.getloadavg()[0]
    title = f"Extender at {result['nodes']} nodes, {result['gpus']} GPUs, {result['pods']} pods (load {busy:.1f} on {os.cpu_count()} cores)"
    table(title, ("figure", "CPU", "clock", "target", "met"), rows)
    verbs = {**result["verbs"], "both over HTTP": result["over_http"]}
    table(
        "Per call", ("verb", "CPU p50 ms", "CPU p99 ms", "clock p50 ms", "clock p99 ms"), [(v, *row.values()) for v, row in verbs.items()]
    )
    header = ("rarely", "CPU p50 ms", "CPU p99 ms", "clock p50 ms", "clock p99 ms")
    table("What happens rarely", header, [(what, *row.values()) for what, row in result["rarely"].items()])
    print(f"\n{result['between_ms']} ms of CPU time for each pod between the calls, for calls to come")
    print(f"{result['pods_per_cpu_second']} pods per second of CPU time through filter, prioritize and bind, one process")
    return all(met == "yes" for *_, met in rows)


def show_growth(results: list[dict[str, Any]]) -> None:
    """Plot the cost of a decision against the number of nodes. Args: results: with equal numbers of pods per node."""
    cost = {result["nodes"]: result["verbs"]["filter + prioritize"] for result in results}
    scale = 40 / max(row["cpu_p50_ms"] for row in cost.values())
    rows = [
        (nodes, row["cpu_p50_ms"], row["cpu_p99_ms"], round(1000 * row["cpu_p50_ms"] / nodes, 3), "#" * round(scale * row["cpu_p50_ms"]))
        for nodes, row in sorted(cost.items())
    ]
    title = f"filter + prioritize against the number of nodes, {CURVE_PODS_PER_NODE} pods on each"
    table(title, ("nodes", "CPU p50 ms", "CPU p99 ms", "us per node", "p50"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=50_000)
    parser.add_argument("--decisions", type=int, default=400)
    parser.add_argument("--no-pause", action="store_true", help="call without pauses between, in which nothing is done ahead")
    parser.add_argument("--no-curve", action="store_true", help="leave out other numbers of nodes, with two pods each")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    pause_seconds = 0.0 if options.no_pause else PAUSE_SECONDS
    results = [measure(options.nodes, options.pods, options.decisions, pause_seconds)]
    met = show(results[0])
    if not options.no_curve:
        curve = [measure(nodes, CURVE_PODS_PER_NODE * nodes, options.decisions, pause_seconds) for nodes in CURVE_NODES]
        show_growth(curve)
        results += curve
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
