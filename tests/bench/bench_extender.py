"""What a scheduling decision costs: filter, prioritize and bind of the extender on a loaded cluster, in the process and over HTTP.

    python -m tests.bench.bench_extender [--nodes 5000] [--pods 50000] [--decisions 400] [--curve] [--json FILE]

The cluster is made as a restart makes it: lists of GpuNodes, nodes and pods in the API's JSON, decoded and applied by the product's code.
Each decision is a new pod (of three shapes in turn) that goes through filter and prioritize with all node names, in a new order each time
as kube-scheduler sends them, and is then bound, so that every decision meets rows that changed since the last. Binding's own cost is
measured against an API that answers at once. Ends with 1 when a figure misses its target.
"""

import argparse
import asyncio
import gc
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from proto import codec, contract, units
from proto.gpunode import decode_gpu_node, encode_gpu_node
from proto.model import ContainerAssignment, DeviceShare, PodAssignment, Policy
from scheduler_plugin.__main__ import decode_host, decode_pod
from scheduler_plugin.adapters.http import HttpServer
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.score import DEFAULT_WEIGHTS
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.extender.filter import filter_nodes
from scheduler_plugin.extender.prioritize import prioritize_nodes
from tests.bench.report import table
from tests.unit.scheduler_plugin.api import node_object, pod_object
from tests.unit.scheduler_plugin.builders import make_device, make_node

GPUS = 8
GPU_MIB = 143_771
SHAPES = (
    {"vgpu": "1", "vgpu_memory": "16000"},
    {"vgpu": "1", "vgpu_memory": "40000", "vgpu_cores": "30"},
    {"vgpu": "2", "vgpu_memory": "64000"},
)


class InstantApi:
    """An API that takes every binding."""

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        return None

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        return None

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        return None


def recorded_lists(nodes: int, pods: int) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Write the lists a restart would read. Pods are like real ones in size: 3 KiB of fields that nobody here reads."""
    rng = random.Random(1)
    filler = {"managedFields": [{"manager": "kubelet", "fieldsV1": {f"f:field-{i}": {} for i in range(80)}}]}
    inventories, hosts, pod_texts = [], [], []
    for index in range(nodes):
        name = f"node-{index:05d}"
        devices = [make_device(name, minor, mib=GPU_MIB, numa=minor // 4) for minor in range(GPUS)]
        inventories.append(encode_gpu_node(make_node(name, devices, linked=True)))
        hosts.append(json.dumps(node_object(name, "192", "2Ti")).encode())
    for index in range(pods):
        node, minor = f"node-{rng.randrange(nodes):05d}", rng.randrange(GPUS)
        share = DeviceShare(f"GPU-{node}-{minor}", rng.choice([8000, 16000, 40000]) * units.MIB, rng.choice([None, 5, 10]))
        uid = f"uid-{index}"
        text = codec.encode_assignment(PodAssignment(uid, (ContainerAssignment("main", (share,)),)))
        pod = pod_object(f"p-{index}", uid=uid, node=node, annotations={contract.ANNOTATION_ASSIGNMENT: text}, vgpu="1")
        pod["metadata"].update(filler)
        pod_texts.append(json.dumps(pod).encode())
    return inventories, hosts, pod_texts


def restart(lists: tuple[list[bytes], list[bytes], list[bytes]]) -> tuple[Desk, float]:
    """Build the state from lists; return it and the seconds until it could answer."""
    begun = time.perf_counter()
    state = ClusterState()
    state.replace_gpu_nodes([decode_gpu_node(text) for text in lists[0]])
    hosts = [decode_host(msgspec.Raw(text)) for text in lists[1]]
    state.replace_hosts({host.name: host.amounts for host in hosts})
    state.replace_pods([decode_pod(msgspec.Raw(text)) for text in lists[2]])
    desk = Desk(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, 10.0, monotonic=time.monotonic)
    state.columns.derive()
    gc.collect()
    gc.freeze()
    return desk, time.perf_counter() - begun


def as_sent(names: list[str], workers: int = 16) -> list[str]:
    """Order names as kube-scheduler sends them: from where it stopped last time, by workers that each take a chunk at a time."""
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


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_ms": round(1000 * statistics.median(ordered), 3),
        "p99_ms": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        "max_ms": round(1000 * ordered[-1], 3),
    }


def timed(call: Callable[[], Any], into: list[float]) -> Any:
    begun = time.perf_counter()
    result = call()
    into.append(time.perf_counter() - begun)
    return result


async def in_process(desk: Desk, names: list[str], decisions: int) -> dict[str, Any]:
    """Measure the verbs from body to body."""
    binder = Binder(desk, InstantApi(), lambda: True)
    filtering: list[float] = []
    rating: list[float] = []
    both: list[float] = []
    binding: list[float] = []
    for number in range(decisions):
        pod = pod_object(f"new-{number}", **SHAPES[number % len(SHAPES)])
        body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": as_sent(names)})
        answer = msgspec.json.decode(timed(lambda body=body: filter_nodes(desk, body, 0.0), filtering))
        body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": answer["NodeNames"]})
        scores = msgspec.json.decode(timed(lambda body=body: prioritize_nodes(desk, body), rating))
        both.append(filtering[-1] + rating[-1])
        node = max(scores, key=lambda entry: entry["Score"])["Host"]
        desk.state.set_pod(decode_pod(msgspec.Raw(msgspec.json.encode(pod))))
        args = {"PodName": pod["metadata"]["name"], "PodNamespace": "team", "PodUID": pod["metadata"]["uid"], "Node": node}
        begun = time.perf_counter()
        result = await binder.bind(msgspec.json.encode(args))
        binding.append(time.perf_counter() - begun)
        if result != b'{"Error":""}':
            raise RuntimeError(result.decode())
    total = sum(both) + sum(binding)
    warm = {"filter": filtering, "prioritize": rating, "filter+prioritize": both, "bind": binding}
    return {verb: percentiles(seconds) for verb, seconds in warm.items()} | {"pods_per_second": round(decisions / total)}


async def over_http(desk: Desk, names: list[str], decisions: int) -> dict[str, float]:
    """Measure filter and prioritize as kube-scheduler sees them: keep-alive over loopback, server and client in one process."""

    async def filtered(body: bytes) -> bytes:
        return filter_nodes(desk, body, 0.0)

    async def prioritized(body: bytes) -> bytes:
        return prioritize_nodes(desk, body)

    server = HttpServer("127.0.0.1", 0, verbs={"/filter": filtered, "/prioritize": prioritized}, max_body_bytes=1 << 27)
    address = await server.start()
    seconds = []
    async with aiohttp.ClientSession() as session:
        for number in range(decisions):
            pod = pod_object(f"http-{number}", **SHAPES[number % len(SHAPES)])
            body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": as_sent(names)})
            begun = time.perf_counter()
            async with session.post(f"http://{address}/filter", data=body) as response:
                answer = await response.read()
            spent = time.perf_counter() - begun
            body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": msgspec.json.decode(answer)["NodeNames"]})
            begun = time.perf_counter()
            async with session.post(f"http://{address}/prioritize", data=body) as response:
                await response.read()
            seconds.append(spent + time.perf_counter() - begun)
    await server.stop()
    return percentiles(seconds)


def measure(nodes: int, pods: int, decisions: int) -> dict[str, Any]:
    """Measure one size of cluster."""
    desk, ready_seconds = restart(recorded_lists(nodes, pods))
    names = [f"node-{index:05d}" for index in range(nodes)]
    return {
        "nodes": nodes,
        "gpus": nodes * GPUS,
        "pods": pods,
        "restart_to_ready_s": round(ready_seconds, 2),
        "in_process": asyncio.run(in_process(desk, names, decisions)),
        "over_http": asyncio.run(over_http(desk, names, decisions)),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def figures(result: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Name the figures that have a target at 5,000 nodes, with what was measured and the target."""
    verbs, http = result["in_process"], result["over_http"]
    return [
        ("filter + prioritize, p50 ms", verbs["filter+prioritize"]["p50_ms"], 1.0),
        ("filter + prioritize, p99 ms", verbs["filter+prioritize"]["p99_ms"], 5.0),
        ("filter + prioritize over HTTP, p99 ms", http["p99_ms"], 8.0),
        ("bind, p99 ms", verbs["bind"]["p99_ms"], 1.0),
        ("restart to ready, s", result["restart_to_ready_s"], 10.0),
        ("memory, MiB", result["max_rss_mib"], 1024.0),
    ]


def show(result: dict[str, Any]) -> bool:
    """Print one size of cluster; return whether every target is met."""
    rows = [(name, value, target, "yes" if value <= target else "no") for name, value, target in figures(result)]
    title = f"Extender at {result['nodes']} nodes, {result['gpus']} GPUs, {result['pods']} pods"
    table(title, ("figure", "measured", "target at 5,000 nodes", "met"), rows)
    verbs = {**{verb: row for verb, row in result["in_process"].items() if isinstance(row, dict)}, "both over HTTP": result["over_http"]}
    table("Per call", ("verb", "p50 ms", "p99 ms", "max ms"), [(verb, *row.values()) for verb, row in verbs.items()])
    print(f"\n{result['in_process']['pods_per_second']} pods per second through filter, prioritize and bind, one process")
    return all(met == "yes" for *_, met in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=50_000)
    parser.add_argument("--decisions", type=int, default=400)
    parser.add_argument("--curve", action="store_true", help="first 1,000, 2,000 and 15,000 nodes, ten pods per node, for the growth")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    sizes = [(count, 10 * count) for count in (1000, 2000, 15_000)] if options.curve else []
    results = [measure(nodes, pods, options.decisions) for nodes, pods in (*sizes, (options.nodes, options.pods))]
    met = [show(result) for result in results]
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    return 0 if met[-1] else 1


if __name__ == "__main__":
    sys.exit(main())
