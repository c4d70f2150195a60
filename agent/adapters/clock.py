# SPDX-License-Identifier: Apache-2.0
"""The system's clocks."""

import time


class SystemClock:
    """Implements ``ports.Clock``."""

    def monotonic(self) -> float:
        """See ``ports.Clock``."""
        return time.monotonic()

    def now(self) -> float:
        """See ``ports.Clock``."""
        return time.time()
