"""``make bench``: every benchmark, one after the other, so that they do not disturb each other.

    python -m tests.bench [NAME ...]     all of them, or those named: shim, agent, extender, placement, cli

Each prints Markdown tables; docs/benchmarks.md quotes a run. A benchmark that ends with another status than 0 ends this one with it.
"""

import subprocess
import sys

BENCHMARKS = ("shim", "agent", "extender", "placement", "cli")


def main() -> int:
    """Run the benchmarks named on the command line, or all."""
    names = sys.argv[1:] or BENCHMARKS
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    return max(subprocess.run([sys.executable, "-m", f"tests.bench.bench_{name}"], check=False).returncode for name in names)


if __name__ == "__main__":
    sys.exit(main())
