# SPDX-License-Identifier: Apache-2.0
"""kube-scheduler's own scores of nodes by CPU and RAM, each plugin from 0 to 100 in whole numbers.

By default it adds the least allocated (NodeResourcesFit) and CPU and RAM in balance (NodeResourcesBalancedAllocation), with equal weight.
GPUs count only where NodeResourcesFit is configured so. Source: pkg/scheduler/framework/plugins/noderesources of Kubernetes.
"""

import numpy as np

from aliquot_lab.simulate.engine import Floats, Ints
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.score.cost import HostDemand


def default_scores(state: ClusterState, rows: Ints, demand: HostDemand) -> Ints:
    """Score nodes by the defaults; higher is better."""
    return least_allocated(*used_parts(state, rows, demand))


def most_allocated_scores(state: ClusterState, rows: Ints, demand: HostDemand, gpu: Floats) -> Ints:
    """Score nodes by the strategy MostAllocated over CPU, RAM and GPUs with equal weights, and the default balance.

    Args: gpu: used part of the GPUs of each row with the pod; NaN for a pod without GPUs, where they do not count.
    """
    return most_allocated(*used_parts(state, rows, demand), gpu)


def least_allocated(cpu: Floats, ram: Floats) -> Ints:
    """Score by the defaults. Args: used parts with the pod."""
    least: Ints = ((100 * (1 - cpu)).astype(np.int64) + (100 * (1 - ram)).astype(np.int64)) // 2
    return least + _balance(cpu, ram)


def most_allocated(cpu: Floats, ram: Floats, gpu: Floats) -> Ints:
    """Score as ``most_allocated_scores`` does. Args: used parts with the pod; NaN where GPUs do not count."""
    parts = [(100 * part).astype(np.int64) for part in (cpu, ram, np.nan_to_num(gpu))]
    count = np.where(np.isnan(gpu), 2, 3)
    most: Ints = (parts[0] + parts[1] + parts[2]) // count
    return most + _balance(cpu, ram)


def used_parts(state: ClusterState, rows: Ints, demand: HostDemand) -> tuple[Floats, Floats]:
    """Return the used parts of CPU and RAM once the pod runs there; 1 for a node without any."""
    columns = state.columns
    cpu = (columns.cpu_used_milli[rows] + demand.cpu_milli) / np.maximum(columns.cpu_milli[rows], 1)
    ram = (columns.ram_used_mib[rows] + demand.ram_mib) / np.maximum(columns.ram_mib[rows], 1)
    return cpu, ram


def _balance(cpu: Floats, ram: Floats) -> Ints:
    balance: Ints = (100 * (1 - abs(cpu - ram) / 2)).astype(np.int64)
    return balance
