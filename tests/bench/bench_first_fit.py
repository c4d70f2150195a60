# SPDX-License-Identifier: Apache-2.0
"""Measures what is allocated where GPUs are claimed: on the node that the extender rates best, the first device that fits.

    python -m tests.bench.bench_first_fit [--trace DIR] [--lists NAME,...] [--seeds N] [--jobs N]

DIR contains the openb trace (csv/); the default is ALIQUOT_TRACE. Each pod becomes a ResourceClaim of the webhook's own template. The
extender's code for claims judges and rates the nodes, and the device is the predicted one. tests/property/test_first_fit.py shows that
this is the device that Kubernetes' allocator takes. Three columns:

vgpus            the same pods with nvidia.com/vgpu: node and device are ours
claims           node by the extender, first device that fits
claims, no node  node by kube-scheduler's default scores, first device that fits: claims without Aliquot's scheduler

Ends with 1 when claims allocate less than MAX_BELOW points below vgpus, or less than without the extender.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

import numpy as np

from aliquot import contract
from aliquot.contract.model import Policy
from aliquot.placement.request import pod_request
from aliquot_lab.simulate.extender import SHARES_PER_GPU, ExtenderEngine
from aliquot_lab.simulate.kube_scores import default_scores
from aliquot_lab.simulate.run import NOTED_PERCENT, Task, replay_arrivals
from aliquot_lab.simulate.trace import NODE_LIST, WHOLE_GPU_MILLI, PodClass, TraceNode, TracePod, pod_lists
from scheduler_plugin.core.claims.stored import Part, StoredClaim
from scheduler_plugin.core.claims.templates import template_of
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS, HostDemand
from scheduler_plugin.extender.claims import ClaimVerdicts
from tests.bench.report import table

ENVIRONMENT = "ALIQUOT_TRACE"
FORMS = ("vgpus", "claims", "claims, no node")
MAX_BELOW = 0.1
CLASS_EXPRESSION = f"device.driver == '{contract.DRA_DRIVER}' && device.attributes['{contract.DRA_DRIVER}'].type == 'gpu'"


class Ticks:
    """A clock on which nothing expires."""

    def monotonic(self) -> float:
        return 0.0

    def now(self) -> float:
        return 0.0


class ClaimEngine(ExtenderEngine):
    """The extender's code for claims as an engine of the simulation."""

    def __init__(self, nodes: Sequence[TraceNode], *, rates_nodes: bool) -> None:
        """Args: rates_nodes: whether the extender chooses the node; otherwise kube-scheduler's defaults do."""
        super().__init__(nodes, Policy.FRAG, DEFAULT_WEIGHTS)
        self._rates_nodes = rates_nodes
        self._claims = ClaimVerdicts(self._state, self._shapes, Policy.FRAG, Ticks(), 10.0)
        self._claims.is_current = True
        self._claims.pools.replace_classes([device_class(name) for name in (contract.DRA_CLASS, contract.DRA_CLASS_WHOLE)])
        self._claims.holds.replace_slices([slice_of(node) for node in nodes if node.gpus])
        self._specs: dict[PodClass, tuple[dict, bytes]] = {}

    def place(self, pod: TracePod) -> bool:
        """Place a pod as kube-scheduler does: filter, scores, then the devices, which its claim keeps."""
        if not pod.kind.gpus:
            return super().place(pod)
        claim, facts = self._claim(pod), self._facts(pod)
        self._claims.holds.set_claim(claim)
        self._state.set_pod(facts)
        query = self._claims.query(facts)
        assert not isinstance(query, str), query
        row = self._best(self._claims.judge(facts, query), query.demand, pod.name)
        if row is None:
            self._state.drop_pod(facts.uid)
            self._claims.holds.drop_claim(claim)
            return False
        taken = [taken for group in self._claims.taking(query, row) for taken in group]
        assert taken
        parts = tuple(Part(one.request, one.device, one.consumed) for one in taken)
        self._claims.holds.set_claim(StoredClaim(claim.key, claim.uid, claim.spec, claim.shape, parts, (facts.uid,)))
        self._state.set_pod(self._facts(pod, self._state.names[row]))
        return True

    def _best(self, verdict, demand: HostDemand, name: str) -> int | None:
        columns = self._state.columns
        rows = slice(columns.rows)
        fits = verdict.reason[rows] == NodeReason.FITS.value
        fits &= columns.cpu_milli[rows] - columns.cpu_used_milli[rows] >= demand.cpu_milli
        fits &= columns.ram_mib[rows] - columns.ram_used_mib[rows] >= demand.ram_mib
        fitting = np.flatnonzero(fits)
        if not len(fitting):
            return None
        scores = verdict.score[fitting] if self._rates_nodes else default_scores(self._state, fitting, demand)
        best = fitting[scores == scores.max()]
        return int(best[self._shapes.tie_break(best, name)])

    def _facts(self, pod: TracePod, node: str = "") -> PodFacts:
        kind = pod.kind
        return PodFacts(pod.name, "trace", pod.name, node, True, False, 0, kind.cpu_milli, kind.ram_mib, claims=(pod.name,))

    def _claim(self, pod: TracePod) -> StoredClaim:
        if pod.kind not in self._specs:
            request = pod_request(self._kind_of(pod).gpu)
            template = template_of(request.containers[0], request.preferences)
            self._specs[pod.kind] = template.spec, template.name.encode()
        spec, shape = self._specs[pod.kind]
        return StoredClaim(("trace", pod.name), pod.name, spec, shape, None, ())


def device_class(name: str) -> dict:
    return {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": CLASS_EXPRESSION}}]}}


def slice_of(node: TraceNode) -> dict:
    """Return a node's slice as the agent publishes it."""
    memory = f"{WHOLE_GPU_MILLI}Mi"
    capacity = {
        "memory": {"value": memory, "requestPolicy": {"default": memory, "validRange": {"min": "1Mi", "max": memory, "step": "1Mi"}}},
        "cores": {"value": "100", "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "100", "step": "1"}}},
        "shares": {"value": str(SHARES_PER_GPU), "requestPolicy": {"default": "1", "validValues": ["1"]}},
    }
    devices = [
        {
            "name": f"gpu-{minor}",
            "attributes": {
                "type": {"string": "gpu"},
                "uuid": {"string": f"GPU-{node.name}-{minor}"},
                "productName": {"string": node.model},
            },
            "capacity": capacity,
            "allowMultipleAllocations": True,
        }
        for minor in range(node.gpus)
    ]
    pool = {"name": node.name, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": contract.DRA_DRIVER, "nodeName": node.name, "pool": pool, "devices": devices}
    return {"metadata": {"name": f"{node.name}-{contract.DRA_DRIVER}-0"}, "spec": spec}


def allocated(form: str, task: Task) -> tuple[float, ...]:
    """Run one replay; return the allocated percentages at NOTED_PERCENT of arrived demand."""
    nodes, pods = task.read()
    engine = ExtenderEngine(nodes, Policy.FRAG) if form == "vgpus" else ClaimEngine(nodes, rates_nodes=form == "claims")
    return replay_arrivals(engine, nodes, pods, task.seed).allocated


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=os.environ.get(ENVIRONMENT), help=f"directory of the trace (default: ${ENVIRONMENT})")
    parser.add_argument("--lists", default="default", help="pod lists, with commas (default: default)")
    parser.add_argument("--seeds", type=int, default=2, help="replays of each list and form (default: 2)")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(argv)
    if options.trace is None:
        print(f"NOT MEASURED: no trace. Give --trace DIR or set {ENVIRONMENT}; docs/measurements/placement.md says where it comes from")
        return 0
    directory = Path(options.trace)
    directory = directory / "csv" if (directory / "csv").is_dir() else directory
    rows, kept = [], True
    with ProcessPoolExecutor(options.jobs) as pool:
        for name in options.lists.split(","):
            tasks = [Task(directory / NODE_LIST, pod_lists(directory)[name], name, "frag", 42 + seed) for seed in range(options.seeds)]
            running = {form: [pool.submit(allocated, form, task) for task in tasks] for form in FORMS}
            found = {form: [fmean(at) for at in zip(*(one.result() for one in runs), strict=True)] for form, runs in running.items()}
            kept &= all(
                claims >= max(vgpus - MAX_BELOW, alone) for vgpus, claims, alone in zip(*(found[form] for form in FORMS), strict=True)
            )
            rows.append([name, *("/".join(f"{value:.2f}" for value in found[form]) for form in FORMS)])
    percents = " / ".join(f"{percent} %" for percent in NOTED_PERCENT)
    table(f"Allocated GPUs in percent, at {percents} of arrived demand, {options.seeds} seeds", ["pod list", *FORMS], rows)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
