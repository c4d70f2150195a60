# SPDX-License-Identifier: Apache-2.0
"""The table of clients (docs/measurements/clients.md) of one run: which programs of others do what, bare, behind the front, preloaded.

Run it alone: ``python -m tests.bench.bench_clients [--quick]``. Ends with the status of the tests that fill the table.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench import report
from tests.clients import page
from tests.clients.installing import ROOT

HEADER = tuple(page.cells_of(page.HEADER))


def main() -> int:
    """Run the tests of the clients and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the clients that are small to install")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aliquot-clients-") as folder:
        file = Path(folder) / "page.md"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/clients", "--clients-page", str(file)]
        done = subprocess.run([*command, *(["--light"] if options.quick else [])], cwd=ROOT, stdout=sys.stderr, check=False)
        rows = [tuple(page.cells_of(row)) for of_client in page.read_rows(file).values() for row in of_client]
    report.table("Programs of others", HEADER, [row for row in rows if len(row) == len(HEADER)])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
