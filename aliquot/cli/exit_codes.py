"""What the commands end with, for scripts. The help of ``aliquot`` prints this table."""

from typing import Final

OK: Final = 0
FAILED: Final = 1
"""The cluster or the node could not be asked, or refused."""
USAGE: Final = 2
NOT_FOUND: Final = 3
"""A GPU, node or pod that was named is not there."""
FINDINGS: Final = 4
"""The answer is there and bad: doctor found errors, or there is drift."""

TABLE: Final = {
    OK: "done, and all is well",
    FAILED: "the cluster or the node could not be asked, or refused",
    USAGE: "wrong arguments",
    NOT_FOUND: "a GPU, node or pod that was named is not there",
    FINDINGS: "answered, and the answer is bad: doctor found errors, or there is drift",
}
