# SPDX-License-Identifier: Apache-2.0
import asyncio

from agent.services.changes import Changes


async def test_a_change_wakes_every_waiter():
    changes = Changes()
    waiters = [asyncio.ensure_future(changes.after(0)) for _ in range(3)]
    await asyncio.sleep(0)
    changes.notify()
    assert await asyncio.gather(*waiters) == [1, 1, 1]


async def test_a_change_before_the_wait_is_not_missed():
    changes = Changes()
    changes.notify()
    changes.notify()
    assert await asyncio.wait_for(changes.after(0), 1) == 2


async def test_a_wait_ends_when_the_time_is_up():
    assert await Changes().after(0, 0.01) == 0
