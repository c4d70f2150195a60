# SPDX-License-Identifier: Apache-2.0
"""``make bench``: runs the benchmarks one after the other, so that they do not affect each other.

    python -m tests.bench [NAME ...]     all of them, or those named, such as: shim, faults, clients, agent, cli

``scale`` runs only when it is named: it needs root and a Go toolchain, and takes minutes.
Each prints Markdown tables; docs/measurements/benchmarks.md quotes a run.
If a benchmark fails, this program ends with its status.
"""

import subprocess
import sys

BENCHMARKS = ("shim", "faults", "clients", "agent", "claims", "extender", "admission", "placement", "mig", "cli")
ON_REQUEST = ("scale",)


def main() -> int:
    """Run the benchmarks named on the command line, or all."""
    names = sys.argv[1:] or BENCHMARKS
    unknown = [name for name in names if name not in BENCHMARKS + ON_REQUEST]
    if unknown:
        print(f"no benchmark named {', '.join(unknown)}; there are {', '.join(BENCHMARKS + ON_REQUEST)}", file=sys.stderr)
        return 2
    return max(subprocess.run([sys.executable, "-m", f"tests.bench.bench_{name}"], check=False).returncode for name in names)


if __name__ == "__main__":
    sys.exit(main())
