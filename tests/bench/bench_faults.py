# SPDX-License-Identifier: Apache-2.0
"""Fault injection: every call of the shim to CUDA and NVML with each of their errors, in every way to take memory (tests/fakes/faults.py).

Run it alone: ``python -m tests.bench.bench_faults [--quick]``. Ends with status 1 when memory passed uncharged.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench import nodes, report
from tests.fakes import faults

QUICK_CASES = 6
"""Of each call with ``--quick``."""
SHOWN = 20


def main() -> int:
    """Run the cases and print what they came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CASES} cases of each call")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aliquot-faults-") as directory:
        faulty = faults.Faults(nodes.simulated(Path(directory), "h200x8"), Path(directory))
        of_cuda, of_nvml = faults.all_cases(), faults.nvml_cases()
        if options.quick:
            of_cuda, of_nvml = (faults.some_cases(seed=0, each=QUICK_CASES, of=cases) for cases in (of_cuda, of_nvml))
        outcome = faulty.run([*of_cuda, *of_nvml])
    rows = [
        ("calls to CUDA x errors", _size(of_cuda)),
        ("calls to NVML x errors", _size(of_nvml)),
        ("cases, each one process; the call was made", f"{outcome.cases}; {outcome.asked}"),
        ("ways to take memory in each", f"{len(faults.WAYS)}"),
        ("blocks of memory taken; calls refused", f"{outcome.taken}; {outcome.refused}"),
        ("uncharged", f"{len(outcome.findings)}"),
    ]
    report.table("Fault injection", ("what", "found"), rows)
    for finding in outcome.findings[:SHOWN]:
        print(f"{finding.case}: {finding.way}: {finding.uncharged_bytes} bytes uncharged, {finding.over_bytes} over the limit")
    return 1 if outcome.findings else 0


def _size(cases: Sequence[faults.Case]) -> str:
    return f"{len({case.question for case in cases})} x {len({case.error for case in cases})}"


if __name__ == "__main__":
    sys.exit(main())
