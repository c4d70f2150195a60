# SPDX-License-Identifier: Apache-2.0
"""Random histories of workloads, pods outside of queues, Kueue's writes, lost replies and new leaders, with the check and without.

With the check, each admitted workload starts: after any history, and with nothing freed, all of its pods find their seats. Plain Kueue
admits by sums of memory, so some of its workloads wait although they are admitted. Both counts come from the same histories.
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.fakes.kueue import GPU_MIB, World, pod_set

EVENTS = 40
NODES = {"n1": 2, "n2": 2}
SIZES = (100, 300, 400, 600, 700, 1000)
QUOTA_MIB = sum(NODES.values()) * GPU_MIB
"""What the GPUs have in sum, as a queue would state it."""


class History:
    """One history; the same seed makes the same choices with the check and without."""

    def __init__(self, seed: int, *, checked: bool) -> None:
        self.world = World(nodes=NODES, quota_mib=QUOTA_MIB, checked=checked)
        self.dice = random.Random(seed)
        self.names = 0
        self.stuck = Counter[str]()

    async def play(self, events: int = EVENTS) -> None:
        """Let everything happen, and count the workloads that cannot start at the end."""
        for _ in range(events):
            await self.act()
            self.world.check_devices()
        await self.world.settle()
        assert self.world.ready_without_seats == []
        await self.world.settle(seconds=1.0)  # a changed reason is not written at once
        assert not (self.world.checked and self.world.unexplained())

    async def act(self) -> None:
        """Do one thing that can happen at any time."""
        dice, world = self.dice, self.world
        at_once: list[Callable[[], object]] = [self.submit, self.submit, self.kueue, self.kueue, self.kueue, self.kueue]
        at_once += [
            world.list_workloads,
            world.list_workloads,
            world.deliver,
            world.deliver,
            self.intrude,
            self.end,
            self.evict,
            self.grow,
            self.grow,
            self.trouble,
        ]
        choice = dice.randrange(len(at_once) + 6)
        if choice < len(at_once):
            at_once[choice]()
        elif choice < len(at_once) + 3:
            await world.step(dice.choice((0.5, 1.0, 5.0, 31.0)))
        elif choice < len(at_once) + 5:
            await world.schedule()
        else:
            world.start()  # another leader

    def submit(self) -> None:
        dice, self.names = self.dice, self.names + 1
        sets = [pod_set(dice.randint(1, 3), dice.choice(SIZES), f"set{number}") for number in range(dice.choice((1, 1, 2)))]
        self.world.submit(f"w{self.names}", *sets, priority=dice.randrange(3))

    def kueue(self) -> None:
        if self.world.workloads:
            self.world.kueue(self.dice.choice(sorted(self.world.workloads)), adds_checks_first=self.dice.random() < 0.5)

    def intrude(self) -> None:
        self.world.intrude(self.dice.choice(SIZES))

    def end(self) -> None:
        """End a pod outside of queues, or a workload, or delete one."""
        world, dice = self.world, self.dice
        others = sorted(uid for uid in world.pods if uid not in world.pod_sets_of)
        if others and dice.random() < 0.5:
            world.end_pod(dice.choice(others))
        elif world.workloads:
            name = dice.choice(sorted(world.workloads))
            (world.finish if dice.random() < 0.7 else world.delete)(name)

    def evict(self) -> None:
        """Let Kueue preempt a workload."""
        reserved = sorted(name for name, item in self.world.workloads.items() if self.world.is_true(item, "QuotaReserved"))
        running = [name for name in reserved if not self.world.is_true(self.world.workloads[name], "Finished")]
        if running:
            self.world.evict(self.dice.choice(running))

    def grow(self) -> None:
        """Let an elastic job ask for more pods."""
        world, dice = self.world, self.dice
        taken = {world.replaced(item) for item in world.workloads.values()}
        alone = [name for name, item in world.workloads.items() if len(item["spec"]["podSets"]) == 1 and name not in taken]
        settled = [name for name in sorted(alone) if world.is_admitted(name) and not world.is_ending(name)]
        if settled:
            name, self.names = dice.choice(settled), self.names + 1
            world.grow(name, f"w{self.names}", world.workloads[name]["spec"]["podSets"][0]["count"] + dice.randint(1, 2))
            if not world.kueue(f"w{self.names}"):
                del world.workloads[f"w{self.names}"]  # it would wait for quota

    def trouble(self) -> None:
        """Break or mend the API, lose a reply, or let Kueue write in between."""
        world, dice = self.world, self.dice
        world.broken, world.loses_replies, world.refuses = dice.random() < 0.3, dice.random() < 0.3, dice.randrange(3)


async def outcomes(seeds: range) -> tuple[Counter[str], Counter[str]]:
    """Return, with the check and for plain Kueue, how many workloads were admitted at the end, and how many of them cannot start."""
    counts = Counter[str](), Counter[str]()
    for seed in seeds:
        for counted, checked in zip(counts, (True, False), strict=True):
            history = History(seed, checked=checked)
            await history.play()
            world = history.world
            stuck = world.stuck()
            assert not (checked and stuck), f"seed {seed}: {stuck} admitted and waiting"
            counted["stuck"] += len(stuck)
            counted["admitted"] += sum(world.is_admitted(name) for name in world.workloads)
    return counts


@pytest.mark.timeout(300)
async def test_admitted_workloads_start_and_plain_kueue_lets_some_wait() -> None:
    checked, plain = await outcomes(range(100))
    assert checked["stuck"] == 0
    assert checked["admitted"] > 60
    assert plain["stuck"] > 10


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_ten_thousand_histories_admit_nothing_that_cannot_start() -> None:
    checked, plain = await outcomes(range(10_000))
    print(
        f"admission check: {checked['stuck']} of {checked['admitted']} admitted workloads cannot start; plain Kueue: "
        f"{plain['stuck']} of {plain['admitted']}"
    )
    assert checked["stuck"] == 0
    assert plain["stuck"] > 0
