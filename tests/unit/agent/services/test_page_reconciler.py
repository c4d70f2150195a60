# SPDX-License-Identifier: Apache-2.0
import asyncio
from pathlib import Path

from agent.errors import StorageError
from agent.services.page_reconciler import PageReconciler
from tests.unit.agent.fakes import until


class FakePage:
    """Cannot be repaired at first, then is damaged, then whole."""

    def __init__(self, path: Path, failures: int) -> None:
        self.path = path
        self.failures = failures
        self.looks = 0

    def repair(self) -> bool:
        self.looks += 1
        if self.looks <= self.failures:
            raise StorageError(f"mending {self.path}: no space left on device")
        return self.looks == self.failures + 1


async def test_each_page_is_checked_forever_despite_errors(caplog):
    pages = [FakePage(Path("/run/priority/page"), 2), FakePage(Path("/run/turns/page"), 0)]
    running = asyncio.ensure_future(PageReconciler(pages, 0.01).run())
    await until(lambda: all(page.looks >= 4 for page in pages))
    running.cancel()
    said = [record for record in caplog.records if "is repaired" in record.message]
    assert sorted(record.path for record in said) == [str(page.path) for page in pages]
    assert sum("no space left" in record.message for record in caplog.records) == 2
