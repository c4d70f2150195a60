# SPDX-License-Identifier: Apache-2.0
"""Reads the published results of FGD's evaluation (1,020 runs: 6 policies, 17 pod lists, 10 seeds), if the user has them.

Columns ``workload,sc_policy,tune,seed,...,0,...,130``: the allocated, or fragmented, percentage of GPUs at each percentage of arrived
demand.
"""

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from aliquot_lab.simulate.baselines import BASELINES
from aliquot_lab.simulate.run import NOTED_PERCENT
from aliquot_lab.simulate.trace import POD_LIST_PREFIX, TraceError

ALLOCATION_FILE: Final = "analysis_allo_discrete.csv"
FRAGMENTATION_FILE: Final = "analysis_frag_discrete.csv"

Means = Mapping[tuple[str, str], tuple[float, ...]]
"""By trace and policy, at NOTED_PERCENT of arrived demand."""


class Published(NamedTuple):
    """Published results; empty without the file."""

    allocated: Means
    fragmented: Means


def read_published(file: Path) -> Means:
    """Return the means over the seeds. Raises TraceError."""
    policy_of = {name: policy for policy, name in BASELINES.items() if name}
    values: dict[tuple[str, str], list[Sequence[float]]] = defaultdict(list)
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                key = row["workload"].removeprefix(POD_LIST_PREFIX), policy_of[row["sc_policy"]]
                values[key].append([float(row[str(percent)]) for percent in NOTED_PERCENT])
    except OSError as exc:
        raise TraceError(f"{file}: expected published results, {exc.strerror or exc}") from exc
    except (KeyError, ValueError) as exc:
        raise TraceError(f"{file}: expected the columns workload, sc_policy and 0 to 130 with numbers, found {exc}") from exc
    return {key: tuple(sum(column) / len(column) for column in zip(*rows, strict=True)) for key, rows in values.items()}
