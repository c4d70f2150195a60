# SPDX-License-Identifier: Apache-2.0
"""Where the suite keeps things. Nothing outside ``build/e2e`` is ever written (packages of the machine apart)."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CLUSTER_SOURCE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "e2e"
"""Kept between runs: programs and images, each under a name made from what they were made of."""
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
"""Which of the processes that share the scenarios this is; each has a cluster of its own. Empty where one process runs them all."""
RUN = BUILD / "-".join(filter(None, ("run", WORKER)))
"""One cluster's state; gone when the cluster is."""
