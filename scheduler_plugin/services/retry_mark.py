# SPDX-License-Identifier: Apache-2.0
"""The annotation by which a waiting pod changes, so that kube-scheduler tries it again at once."""

from collections.abc import Mapping

from aliquot import contract
from scheduler_plugin.extender.context import ExtenderContext


class RetryMark:
    """Makes values that no earlier one equals, also after a restart: the state's change counter starts again with each process."""

    def __init__(self, context: ExtenderContext) -> None:
        self._columns = context.state.columns
        self._started_at = round(context.clock.now())

    def annotations(self) -> Mapping[str, str]:
        """Return what to set on the pod."""
        return {contract.ANNOTATION_RETRY: f"{self._started_at}-{self._columns.change_count}"}
