# SPDX-License-Identifier: Apache-2.0
"""Exit codes of the commands, for scripts. ``aliquot --help`` prints the table."""

from typing import Final

OK: Final = 0
FAILED: Final = 1
"""The cluster or the node did not answer, or refused the request."""
USAGE: Final = 2
NOT_FOUND: Final = 3
"""The GPU, node or pod that the user named does not exist."""
FINDINGS: Final = 4
"""The command worked and found a problem: errors in doctor, drift, or a pod that fits nowhere."""

TABLE: Final = {
    OK: "success, no problem found",
    FAILED: "the cluster or the node did not answer, or refused the request",
    USAGE: "invalid arguments",
    NOT_FOUND: "the named GPU, node or pod does not exist",
    FINDINGS: "success, but with a problem: errors in doctor, drift, or a pod that fits nowhere",
}
