# SPDX-License-Identifier: Apache-2.0
"""Starts ``aliquot-scheduler``, or prints one sentence if the packages that it needs are not installed."""

import sys

from aliquot.process.extras import MissingExtraError, scheduler_extra


def main() -> int:
    """Run the scheduler; return the exit code: that of ``scheduler_plugin.__main__``, or 1 when packages are missing."""
    try:
        with scheduler_extra("aliquot-scheduler"):
            from scheduler_plugin.__main__ import main as run
    except MissingExtraError as exc:
        print(f"aliquot scheduler: {exc}", file=sys.stderr)
        return 1
    return run()
