import asyncio
from pathlib import Path

from agent.errors import StorageError
from agent.services.page_keeper import PageKeeper
from tests.unit.agent.fakes import until


class FakePage:
    """Cannot be mended at first, then is damaged, then whole."""

    def __init__(self, path: Path, failures: int) -> None:
        self.path = path
        self.failures = failures
        self.looks = 0

    def mend(self) -> bool:
        self.looks += 1
        if self.looks <= self.failures:
            raise StorageError(f"mending {self.path}: no space left on device")
        return self.looks == self.failures + 1


async def test_each_page_is_looked_at_for_ever_whatever_happens_to_it(caplog):
    pages = [FakePage(Path("/run/priority/page"), 2), FakePage(Path("/run/turns/page"), 0)]
    running = asyncio.ensure_future(PageKeeper(pages, 0.01).run())
    await until(lambda: all(page.looks >= 4 for page in pages))
    running.cancel()
    said = [record for record in caplog.records if "is mended" in record.message]
    assert sorted(record.path for record in said) == [str(page.path) for page in pages]
    assert sum("no space left" in record.message for record in caplog.records) == 2
