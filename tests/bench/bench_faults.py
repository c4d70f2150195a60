# SPDX-License-Identifier: Apache-2.0
"""Fault injection: every query of the shim to the driver with every error, in every way to take memory (tests/fakes/faults.py).

Run it alone: ``python -m tests.bench.bench_faults [--quick]``. Ends with status 1 when memory passed uncharged.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.bench import nodes, report
from tests.fakes import faults

QUICK_CASES = 6
"""Of each query with ``--quick``."""
SHOWN = 20


def main() -> int:
    """Run the cases and print what they came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CASES} cases of each query")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aliquot-faults-") as directory:
        faulty = faults.Faults(nodes.simulated(Path(directory), "h200x8"), Path(directory))
        outcome = faulty.run(faults.some_cases(seed=0, each=QUICK_CASES) if options.quick else faults.all_cases())
    rows = [
        ("questions x errors", f"{outcome.questions} x {outcome.errors}"),
        ("cases, each one process", f"{outcome.cases}"),
        ("ways to take memory in each", f"{len(faults.WAYS)}"),
        ("blocks of memory taken; calls refused", f"{outcome.taken}; {outcome.refused}"),
        ("uncharged", f"{len(outcome.findings)}"),
    ]
    report.table("Fault injection", ("what", "found"), rows)
    for finding in outcome.findings[:SHOWN]:
        print(f"{finding.case}: {finding.way}: {finding.uncharged_bytes} bytes uncharged, {finding.over_bytes} over the limit")
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    sys.exit(main())
