"""What is done ahead is done piece by piece, while others have their turn, and begins again with every call."""

import asyncio

from scheduler_plugin.services.forethought import Forethought


class Work:
    """So many pieces, and what happened in which order."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces
        self.done: list[str] = []

    def prepare(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self.done.append("piece")
        return True

    async def others(self, turns: int) -> None:
        for _ in range(turns):
            self.done.append("other")
            await asyncio.sleep(0)


async def test_a_piece_at_a_time_is_done_between_what_others_do():
    work = Work(3)
    Forethought(work.prepare).called()
    await work.others(5)
    assert work.done == ["other", "piece", "other", "piece", "other", "piece", "other", "other"]


async def test_calls_that_follow_each_other_at_once_make_one_round():
    work = Work(2)
    forethought = Forethought(work.prepare)
    for _ in range(3):
        forethought.called()
    await work.others(1)
    assert work.done == ["other", "piece"]


async def test_a_call_after_all_was_done_begins_anew():
    work = Work(1)
    forethought = Forethought(work.prepare)
    forethought.called()
    await work.others(3)
    work.left = 1
    forethought.called()
    await work.others(3)
    assert work.done.count("piece") == 2
