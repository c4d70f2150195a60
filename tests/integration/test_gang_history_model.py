# SPDX-License-Identifier: Apache-2.0
"""Any history of gangs, preemption and restarts keeps the invariants of ``gang_world``, and at its end important pods start."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.integration.gang_world import IMPORTANT, SLOTS, TEMPLATES, World, run_in_virtual_time

MAX_ROUNDS = 120
"""Rounds of ROUND_SECONDS until important pods must run: pauses of the preemptor and of gangs end in that time."""
ROUND_SECONDS = 15.0
STEPS = (
    *("schedule",) * 6,
    *("schedule gang",) * 3,
    *("create", "create", "delete", "fail", "end pods", "end pods"),
    *("proceed", "proceed", "deliver", "deliver all", "relist", "wait", "long wait"),
    *("retry", "preemptor", "preemptor", "victims", "restarts"),
    *("lose", "drop", "crash", "takeover"),
)
Step = tuple[str, str, int]
steps = st.tuples(st.sampled_from(STEPS), st.sampled_from(SLOTS), st.integers(0, 6))


class Play:
    """One history."""

    def __init__(self) -> None:
        self.world = World()

    async def run(self, history: Sequence[Step]) -> Counter[str]:
        for slot in SLOTS:
            self.world.create(slot)
        self.world.deliver_all()
        for step in history:
            await self.do(*step)
            self.world.check()
        await self.settle()
        return self.world.seen

    async def do(self, step: str, slot: str, number: int) -> None:
        """Do one step. The world's own steps take the slot, a number or nothing."""
        world = self.world
        match step:
            case "schedule gang":
                for member in SLOTS:
                    if member[0] == slot[0]:
                        await world.schedule(member)
                await self.proceed(number)
            case "schedule":
                await world.schedule(slot)
            case "retry" | "preemptor" | "victims" | "restarts":
                await world.serve(step)
            case "proceed":
                await self.proceed(number)
            case "crash" | "takeover":
                await self.restart(crash=step == "crash")
            case _:
                self.disturb(step, slot, number)

    def disturb(self, step: str, slot: str, number: int) -> None:
        """Do a step that calls no part of the scheduler but its watch."""
        world = self.world
        match step:
            case "create" | "delete" | "fail":
                getattr(world, step)(slot)
            case "deliver":
                world.deliver(number)
            case "wait" | "long wait":
                world.pass_time(70.0 if step == "long wait" else 6.0)
            case "lose":
                world.lose_answers = 1
            case "drop":
                world.drop_requests = number
            case _:
                getattr(world, step.replace(" ", "_"))()

    async def proceed(self, turns: int) -> None:
        for _turn in range(2 * turns):
            await asyncio.sleep(0)

    async def restart(self, *, crash: bool) -> None:
        """End the process, or let the leader lose its lease: what it sent arrives before the next one lists the pods."""
        world = self.world
        if crash:
            await world.binder.stop()
            await asyncio.gather(*world.bindings.values(), return_exceptions=True)
        else:
            world.replica += 1
            await self.proceed(2)
        world.start()

    async def settle(self) -> None:
        """Let controllers, kube-scheduler and the scheduler work without trouble until the important pods run; then end everything."""
        world = self.world
        world.lose_answers = world.drop_requests = 0
        await asyncio.gather(*world.bindings.values())
        for slot in IMPORTANT:  # a controller restarts what is left of a gang: its domain may be full of pods as important
            world.delete(slot)
        for _ in range(MAX_ROUNDS):
            await self.round()
            if all((pod := world.live(slot)) is not None and pod.node_name for slot in IMPORTANT):
                break
        else:
            raise AssertionError(f"important pods wait: {[slot for slot in IMPORTANT if not getattr(world.live(slot), 'node_name', '')]}")
        world.seen["bound"] = len(world.running())
        await asyncio.gather(*world.bindings.values())
        world.end_pods()
        world.deliver_all()
        world.pass_time(1000.0)
        world.state.expire(world.now, world.caught_up_at)
        world.check()
        world.check_nothing_leaked()

    async def round(self) -> None:
        world = self.world
        world.end_pods()
        for slot in SLOTS:
            world.create(slot)
        world.deliver_all()
        for slot in sorted(SLOTS, key=lambda slot: -TEMPLATES[slot[0]].priority):
            await world.schedule(slot)
        await asyncio.gather(*world.bindings.values())
        for service in ("retry", "preemptor", "victims", "restarts"):
            world.deliver_all()
            await world.serve(service)
        world.pass_time(ROUND_SECONDS)
        world.check()


def play(history: Sequence[Step]) -> Counter[str]:
    return run_in_virtual_time(Play().run(history))


@settings(max_examples=30, derandomize=True)
@given(st.lists(steps, min_size=20, max_size=80))
def test_any_history_of_gangs_and_preemption_keeps_the_invariants(history):
    for what in play(history):
        event(what)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(max_examples=10_000)
@given(st.lists(steps, min_size=20, max_size=120))
def test_ten_thousand_histories_of_gangs_and_preemption_keep_the_invariants(history):
    play(history)
