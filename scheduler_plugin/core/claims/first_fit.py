# SPDX-License-Identifier: Apache-2.0
"""Predicts which devices of a node kube-scheduler takes for claims: the first solution of its search. Pure.

Since Kubernetes 1.36 the search is deterministic. It goes through the requests of all claims in order, and for each device that a request
needs through the node's devices in order (``slices`` has that order). Within a request it only goes forward, and it goes back when a later
request finds nothing. A device that draws on the counters of its pool needs what it draws to be free there. If several claims can consume
parts of it, the first draws for all of them. A request for all devices gets those that meet its selectors, or none. Admin access takes
nothing from other claims. This is the same search.
tests/property/test_first_fit.py compares it with Kubernetes' own allocator.
Source: k8s.io/dynamic-resource-allocation/structured, ``allocateOne``
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Final

from aliquot.contract.errors import ContractError
from scheduler_plugin.errors import SchedulerError

MOST_DEVICES: Final = 32
"""Devices of one claim."""

MOST_STEPS: Final = 10_000
"""Devices that a search tries; some 0.3 s. The number of combinations grows without a bound, for instance where many equal requests just do
not fit; kube-scheduler gives up after 10 s on a node."""

DeviceKey = tuple[str, str, str]
"""Driver, pool and name."""
PoolKey = tuple[str, str]
"""Driver and name."""
Amounts = Mapping[str, Fraction]


@dataclass(frozen=True, slots=True)
class Capacity:
    """A capacity of a device, and which parts of it claims can consume. Without limits any part."""

    value: Fraction
    default: Fraction | None = None
    least: Fraction | None = None
    most: Fraction | None = None
    step: Fraction | None = None
    valid: tuple[Fraction, ...] = ()
    """The only possible amounts, in ascending order; empty where a range, or nothing, limits them."""

    def consumed(self, asked: Fraction | None) -> Fraction | None:
        """Return what a request for this amount consumes; None if it cannot have it."""
        if asked is None:
            return self.value if self.default is None else self.default
        if self.least is not None:
            return self._in_range(asked, self.least)
        if self.valid:
            return next((amount for amount in self.valid if asked <= amount), None)
        return asked

    def _in_range(self, asked: Fraction, least: Fraction) -> Fraction | None:
        amount = max(asked, least)
        if self.step is not None and amount > least:
            amount = least + self.step * math.ceil((math.ceil(amount) - least) / self.step)
        return None if self.most is not None and amount > self.most else amount


@dataclass(frozen=True, slots=True)
class Taint:
    """What keeps claims without a toleration off a device."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True, slots=True)
class Toleration:
    """What lets a request take devices with a taint. An empty key or effect covers all."""

    key: str = ""
    exists: bool = False
    """Whether any value is covered."""
    value: str = ""
    effect: str = ""

    def covers(self, taint: Taint) -> bool:
        """Whether it covers this taint."""
        return (
            self.effect in ("", taint.effect) and self.key in ("", taint.key) and (self.exists or self.value == taint.value)
        )  # fmt: skip


CounterKey = tuple[str, str, str, str]
"""Driver and pool, the counter's set, and its name."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What a device takes of a counter while it is in use."""

    counter: CounterKey
    amount: Fraction
    total: Fraction
    """What all devices together can take."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a node."""

    key: DeviceKey
    capacity: Mapping[str, Capacity] = field(default_factory=dict)
    shared: bool = False
    """Whether several requests can consume parts of it."""
    attributes: Mapping[str, object] = field(default_factory=dict)
    """Values by the whole name, with its domain."""
    taints: tuple[Taint, ...] = ()
    draws: tuple[Draw, ...] = ()
    """One for each counter at most."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a claim asks for: some devices of one kind."""

    name: str
    """That of a subrequest has the request's name before it, as in ``gpu/large``."""
    count: int = 1
    """Without meaning for one that takes all devices."""
    amounts: Amounts = field(default_factory=dict)
    """Of each device."""
    selectors: tuple[str, ...] = ()
    """Expressions that a device must meet: those of the class, then its own."""
    tolerations: tuple[Toleration, ...] = ()
    takes_all: bool = False
    """Whether it needs all devices that meet its selectors, and have the amounts free before the claims of the search get theirs."""
    is_admin: bool = False
    """Whether it may use devices beside other claims, from which it takes nothing."""


@dataclass(frozen=True, slots=True)
class Match:
    """A constraint: the devices of these requests have one value of an attribute. Without names it is for all requests."""

    attribute: str
    requests: frozenset[str] = frozenset()

    def concerns(self, request: str) -> bool:
        """Whether it is for a request or subrequest."""
        return not self.requests or request in self.requests or request.partition("/")[0] in self.requests


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that is not allocated yet: for each request the alternatives, in the order of preference."""

    requests: tuple[tuple[Request, ...], ...]
    matches: tuple[Match, ...] = ()

    @property
    def takes_all(self) -> bool:
        """Whether a request needs all devices of a kind."""
        return any(one.takes_all for alternatives in self.requests for one in alternatives)


@dataclass(frozen=True, slots=True)
class Taken:
    """A device that a request gets."""

    request: str
    device: DeviceKey
    consumed: Amounts


@dataclass(frozen=True, slots=True)
class Usage:
    """What claims have already."""

    alone: frozenset[DeviceKey] = frozenset()
    """Devices that one claim has alone."""
    consumed: Mapping[DeviceKey, Amounts] = field(default_factory=dict)
    """The sums of the others."""


Selects = Callable[[str, Device], bool]
"""Whether a device meets an expression."""


@dataclass(slots=True)
class Effort:
    """What searches may still do, together."""

    steps: int = MOST_STEPS


def predict(
    devices: Sequence[Device], usage: Usage, claims: Sequence[Claim], selects: Selects, effort: Effort | None = None
) -> Sequence[Sequence[Taken]] | None:
    """Return the devices of each claim; None if the claims do not fit together.

    Args:   devices: of the node, in the search's order. effort: is used up; by default one search has MOST_STEPS.
    Raises: SearchTooLongError: there are too many combinations. ContractError: a value or an expression is not known here, or
            kube-scheduler gives up the pod, because a constraint excludes one of all devices that a request needs.
    """
    search = _Search(devices, usage, claims, selects, effort or Effort())
    return search.taken if search.claim(0) is _Outcome.FOUND else None


class SearchTooLongError(SchedulerError):
    """A search was given up. kube-scheduler may still find devices, or give up too."""


class _Outcome(Enum):
    FOUND = 1
    NOTHING = 2
    SHORT = 3
    """A request found fewer devices than it needs, so no later request was tried."""
    TOO_MANY = 4
    """The claim would have more devices than it can. Other devices for the same requests would not change that."""


class _Search:
    def __init__(self, devices: Sequence[Device], usage: Usage, claims: Sequence[Claim], selects: Selects, effort: Effort) -> None:
        self.taken: list[list[Taken]] = [[] for _ in claims]
        self._devices = devices
        self._claims = claims
        self._selects = selects
        self._alone = usage.alone
        self._takers: dict[DeviceKey, set[int]] = {}
        """For devices that a request of the search has alone, the numbers of the claims: admin access adds further ones."""
        self._consumed = {key: dict(amounts) for key, amounts in usage.consumed.items()}
        self._by_key = {device.key: device for device in devices}
        self._counters = _Counters(devices, usage)
        self._effort = effort
        self._met: dict[tuple[str, DeviceKey], bool] = {}
        self._all = {
            (number, request.name): [device for device in devices if self._could_have(request, device)]
            for number, claim in enumerate(claims)
            for alternatives in claim.requests
            for request in alternatives
            if request.takes_all
        }

    def claim(self, number: int) -> _Outcome:
        """Go on with a claim."""
        return self._request(number, 0) if number < len(self._claims) else _Outcome.FOUND

    def _request(self, number: int, place: int) -> _Outcome:
        """Go on with a request of a claim: with its first alternative that leads to a solution."""
        requests = self._claims[number].requests
        if place == len(requests):
            outcome = self.claim(number + 1)
            return _Outcome.NOTHING if outcome is _Outcome.TOO_MANY else outcome  # the next claim's limit is none for this one
        outcomes = set()
        for alternative in requests[place]:
            take = self._all_devices_of if alternative.takes_all else self._devices_of
            outcome = take(number, place, alternative, 0, 0)
            if outcome is _Outcome.FOUND:
                return outcome
            outcomes.add(outcome)
        return _Outcome.TOO_MANY if outcomes == {_Outcome.TOO_MANY} else _Outcome.NOTHING

    def _devices_of(self, number: int, place: int, request: Request, had: int, start: int) -> _Outcome:
        """Take a request's next devices. Args: had: devices that it has. start: the first device to try."""
        if had == request.count:
            return self._request(number, place + 1)
        lacking = request.count - had
        if len(self.taken[number]) + lacking > MOST_DEVICES:
            return _Outcome.TOO_MANY
        # Where a device takes nothing from the others, there are not more of them without it. So a search that fails has no combinations.
        tried, is_plain = False, not self._counters.exist and not self._claims[number].matches
        for position in range(start, len(self._devices) - lacking + 1):  # behind these are too few
            device = self._devices[position]
            self._step()
            consumed = self._fitting(number, request, device)
            if consumed is None:
                continue
            self._take(number, request, device, consumed)
            outcome = self._devices_of(number, place, request, had + 1, position + 1)
            if outcome is _Outcome.FOUND:
                return outcome
            self._give_back(number, device)
            if outcome is _Outcome.TOO_MANY or (outcome is _Outcome.SHORT and is_plain):
                return outcome
            tried = tried or outcome is not _Outcome.SHORT
        return _Outcome.NOTHING if tried else _Outcome.SHORT

    def _all_devices_of(self, number: int, place: int, request: Request, had: int, _start: int) -> _Outcome:
        """Take the next one of all devices that a request needs."""
        devices = self._all[number, request.name]
        if not devices:
            return _Outcome.NOTHING
        if had == len(devices):
            return self._request(number, place + 1)
        if len(self.taken[number]) + len(devices) - had > MOST_DEVICES:
            return _Outcome.TOO_MANY
        self._step()
        device = devices[had]
        if self._is_in_use(number, request, device) or not self._is_open(request, device):
            return _Outcome.NOTHING
        if not self._matches(number, request, device):
            raise ContractError(f"request {request.name}: a constraint excludes device {device.key[2]}, one of all that it needs")
        consumed = self._amounts(request, device)
        if consumed is None:
            return _Outcome.NOTHING
        self._take(number, request, device, consumed)
        outcome = self._all_devices_of(number, place, request, had + 1, 0)
        if outcome is not _Outcome.FOUND:
            self._give_back(number, device)
        return outcome

    def _could_have(self, request: Request, device: Device) -> bool:
        """Whether a device is one of all that a request needs."""
        return self._is_selected(request, device) and self._amounts(request, device) is not None

    def _step(self) -> None:
        if self._effort.steps <= 0:
            raise SearchTooLongError("no devices found, and there are too many combinations")
        self._effort.steps -= 1

    def _fitting(self, number: int, request: Request, device: Device) -> Amounts | None:
        """Return what the request would consume of a device; None if it cannot have it."""
        if self._is_in_use(number, request, device) or not self._is_selected(request, device) or not self._is_open(request, device):
            return None
        consumed = self._amounts(request, device)
        return consumed if consumed is not None and self._matches(number, request, device) else None

    def _is_in_use(self, number: int, request: Request, device: Device) -> bool:
        """Whether a claim has a device alone, so that the request cannot have it."""
        takers = self._takers.get(device.key, ())
        return number in takers if request.is_admin else bool(takers) or device.key in self._alone

    def _is_open(self, request: Request, device: Device) -> bool:
        """Whether counters and taints let the request have a device."""
        tolerated = (any(one.covers(taint) for one in request.tolerations) for taint in device.taints)
        return self._counters.suffice(device) and all(tolerated)

    def _is_selected(self, request: Request, device: Device) -> bool:
        return all(self._meets(expression, device) for expression in request.selectors)

    def _meets(self, expression: str, device: Device) -> bool:
        key = expression, device.key
        if key not in self._met:
            self._met[key] = self._selects(expression, device)
        return self._met[key]

    def _amounts(self, request: Request, device: Device) -> Amounts | None:
        """Return the amounts that a request would consume, if they are free."""
        if request.amounts.keys() - device.capacity.keys():
            return None
        before = self._consumed.get(device.key, {})
        consumed = {}
        for name, capacity in device.capacity.items():
            amount = capacity.consumed(request.amounts.get(name))
            if amount is None or before.get(name, 0) + amount > capacity.value:
                return None
            consumed[name] = amount
        return consumed

    def _matches(self, number: int, request: Request, device: Device) -> bool:
        """Whether the claim's constraints hold with this device, too."""
        for match in self._claims[number].matches:
            if not match.concerns(request.name):
                continue
            if match.attribute not in device.attributes:
                return False
            if device.attributes[match.attribute] is None:
                raise ContractError(
                    f"attribute {match.attribute} of device {device.key[2]} has a value that is not predicted, such as a list"
                )
            others = (self._by_key[one.device] for one in self.taken[number] if match.concerns(one.request))
            if any(other.attributes[match.attribute] != device.attributes[match.attribute] for other in others):
                return False
        return True

    def _take(self, number: int, request: Request, device: Device, consumed: Amounts) -> None:
        taken = Taken(request.name, device.key, consumed if device.shared else {})
        self.taken[number].append(taken)
        if not device.shared:
            self._takers.setdefault(device.key, set()).add(number)
        self._counters.take(device)
        self._add(taken, 1)

    def _give_back(self, number: int, device: Device) -> None:
        taken = self.taken[number].pop()
        if not device.shared:
            self._takers[device.key].discard(number)
        self._counters.give_back(device)
        self._add(taken, -1)

    def _add(self, taken: Taken, sign: int) -> None:
        sums = self._consumed.setdefault(taken.device, {})
        for name, amount in taken.consumed.items():
            sums[name] = sums.get(name, Fraction(0)) + sign * amount


class _Counters:
    """What is left of the counters of each pool."""

    def __init__(self, devices: Sequence[Device], usage: Usage) -> None:
        self._left: dict[PoolKey, dict[CounterKey, Fraction]] = {}
        self.exist = any(device.draws for device in devices)
        self._users: Counter[DeviceKey] = Counter(dict.fromkeys((*usage.alone, *usage.consumed), 1))
        """By device, the uses of it."""
        for device in devices:
            left = self._left.setdefault(device.key[:2], {})
            for draw in device.draws:
                left.setdefault(draw.counter, draw.total)
        for device in devices:
            if self._users[device.key]:
                self._draw(device, 1)

    def suffice(self, device: Device) -> bool:
        """Whether the device can be taken. If a counter of its pool is used beyond its total, no device of the pool can draw at all."""
        if not device.draws or (device.shared and self._users[device.key]):
            return True
        drawn = {draw.counter: draw.amount for draw in device.draws}
        return all(left >= drawn.get(counter, 0) for counter, left in self._left[device.key[:2]].items())

    def take(self, device: Device) -> None:
        """Note one more use."""
        if not (device.shared and self._users[device.key]):
            self._draw(device, 1)
        self._users[device.key] += 1

    def give_back(self, device: Device) -> None:
        """Note one use less."""
        self._users[device.key] -= 1
        if not (device.shared and self._users[device.key]):
            self._draw(device, -1)

    def _draw(self, device: Device, sign: int) -> None:
        for draw in device.draws:
            self._left[device.key[:2]][draw.counter] -= sign * draw.amount
