# SPDX-License-Identifier: Apache-2.0
"""Errors of the commands. Each prints one sentence to standard error and ends with a status from ``exit_codes``."""

import click

from aliquot_cli import exit_codes


class AccessError(click.ClickException):
    """The cluster does not answer, or refuses the request."""

    exit_code = exit_codes.FAILED

    def __init__(self, message: str, status: int = 0) -> None:
        """Args: status: of the reply; 0 without one."""
        super().__init__(message)
        self.status = status


class NotFoundError(click.ClickException):
    """The GPU, node or pod that the user named does not exist."""

    exit_code = exit_codes.NOT_FOUND
