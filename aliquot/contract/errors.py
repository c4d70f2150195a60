# SPDX-License-Identifier: Apache-2.0
"""The errors of the contract: both sides raise them if text from outside violates the contract.

AliquotError
├── ContractError              text that crosses a process boundary has the wrong form
│   ├── QuantityError          an amount in a pod's limits
│   └── StaleAssignmentError   an assignment made for another pod of the same name
├── RequestError               aliquot/placement/request.py: a pod asks for something that no GPU can give
├── AccountingError            aliquot/placement/device.py: impossible sums
└── KubeApiError               aliquot/kube/errors.py: a request to the Kubernetes API failed

Each message says what was expected, what was found and what to write instead, because users read it in a pod's events.
"""


class AliquotError(Exception):
    """The root of all errors this project raises on purpose."""


class ContractError(AliquotError):
    """Text that crosses a process boundary (an annotation, a device ID) has the wrong form."""


class QuantityError(ContractError):
    """An amount is not a Kubernetes quantity, or its resource cannot have it."""


class StaleAssignmentError(ContractError):
    """An assignment names another pod UID: it was written for an earlier pod of the same name."""


def quote(text: str, limit: int = 80) -> str:
    """Show untrusted text inside a message: quoted, escaped and never longer than ``limit`` characters."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}… ({len(text)} characters)"
