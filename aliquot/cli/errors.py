"""How commands fail: a sentence on standard error, and a status from ``exit_codes``."""

import click

from aliquot.cli import exit_codes


class AccessError(click.ClickException):
    """The cluster cannot be asked, or refuses."""

    exit_code = exit_codes.FAILED


class NotFoundError(click.ClickException):
    """What was named is not there."""

    exit_code = exit_codes.NOT_FOUND
