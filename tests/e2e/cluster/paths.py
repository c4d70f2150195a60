# SPDX-License-Identifier: Apache-2.0
"""Where the suite keeps things. Nothing outside ``build/e2e`` is ever written (packages of the machine apart)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CLUSTER_SOURCE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "e2e"
"""Kept between runs: programs and images, each under a name made from what they were made of."""
RUN = BUILD / "run"
"""One cluster's state; gone when the cluster is."""
