"""The errors of the contract: what both sides raise when text from outside does not say what the contract allows.

AliquotError
├── ContractError              text that crosses a process boundary has the wrong form
│   ├── QuantityError          an amount in a pod's limits
│   └── StaleAssignmentError   an assignment made for another pod of the same name
├── RequestError               placement/request.py: a pod asks for something no GPU can give
└── AccountingError            placement/device.py: sums that cannot be true

Every message says what was expected, what was found and what to write instead: it ends up in a pod's events.
"""


class AliquotError(Exception):
    """The root of all errors this project raises on purpose."""


class ContractError(AliquotError):
    """Text that crosses a process boundary (an annotation, a device ID) has the wrong form."""


class QuantityError(ContractError):
    """An amount is not a Kubernetes quantity, or not one that its resource can have."""


class StaleAssignmentError(ContractError):
    """An assignment names another pod UID: it was written for an earlier pod of the same name."""


def quote(text: str, limit: int = 80) -> str:
    """Show untrusted text inside a message: quoted, escaped and never longer than ``limit`` characters."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}… ({len(text)} characters)"
