# SPDX-License-Identifier: Apache-2.0
"""Cases with a name; tests/property/test_first_fit.py compares with Kubernetes' allocator."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest

from aliquot.contract.errors import ContractError
from scheduler_plugin.core.claims.first_fit import Capacity, Claim, Device, Effort, Match, Request, SearchTooLongError, Usage, predict
from scheduler_plugin.core.claims.objects import check_whole, claim_of, devices_of
from scheduler_plugin.core.claims.selecting import meets


def device(number: int, memory: int = 10) -> Device:
    return Device(("d", "p", f"gpu-{number}"), {"memory": Capacity(Fraction(memory), default=Fraction(memory))}, shared=True)


def asks(memory: int, count: int = 1) -> Claim:
    return Claim(((Request("r", count, {"memory": Fraction(memory)}),),))


def names(*claims: Claim, devices: int = 2, usage: Usage | None = None, effort: Effort | None = None) -> list[list[str]] | None:
    found = predict([device(number) for number in range(devices)], usage or Usage(), claims, lambda _expression, _device: True, effort)
    return None if found is None else [[taken.device[2] for taken in one] for one in found]


def slice_with(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = {"driver": "d", "nodeName": "n", "pool": {"name": "n", "resourceSliceCount": 1}}
    return {"metadata": {"name": "s"}, "spec": {**spec, "devices": [raw]}}


def test_first_device_with_room_is_taken_not_the_best():
    assert names(asks(1), usage=Usage(consumed={("d", "p", "gpu-1"): {"memory": Fraction(9)}})) == [["gpu-0"]]


def test_claims_share_a_device_until_it_is_full():
    assert names(asks(5), asks(5), asks(1)) == [["gpu-0"], ["gpu-0"], ["gpu-1"]]


def test_devices_of_one_request_differ():
    assert names(asks(1, count=2)) == [["gpu-0", "gpu-1"]]
    assert names(asks(1, count=3)) is None


def test_search_with_too_many_combinations_is_given_up():
    with pytest.raises(SearchTooLongError):
        names(*(asks(1) for _ in range(12)), asks(11), devices=8)


@pytest.mark.parametrize("count", [9, 12, 16])
def test_request_for_more_devices_than_have_room_needs_no_combinations(count: int):
    full = {("d", "p", f"gpu-{number}"): {"memory": Fraction(10)} for number in range(0, 16, 2)}
    assert names(asks(1, count), devices=16, usage=Usage(consumed=full), effort=Effort(steps=40)) is None


def test_attribute_of_another_kind_is_an_error_not_a_prediction():
    """Such as a list, since Kubernetes 1.36."""
    found = devices_of("n", [slice_with({"name": "nic-0", "attributes": {"rail": {"strings": ["a", "b"]}}})])
    claim = Claim(((Request("r"),),), (Match("d/rail"),))
    with pytest.raises(ContractError, match="not predicted"):
        predict(found, Usage(), [claim], lambda *_: True)
    with pytest.raises(ContractError, match="of a known kind"):
        meets("device.attributes['d'].rail != 'c'", found[0])


def test_device_with_unreadable_version_is_an_error_not_a_prediction():
    """Kubernetes then evaluates none of its attributes."""
    with pytest.raises(ContractError, match="64 bits"):
        devices_of("n", [slice_with({"name": "gpu-0", "attributes": {"firmware": {"version": f"{1 << 64}.0.0"}}})])


def test_capacity_with_two_names_is_an_error_not_a_prediction():
    found = devices_of("n", [slice_with({"name": "gpu-0", "capacity": {"memory": {"value": "1"}, "d/memory": {"value": "2"}}})])
    with pytest.raises(ContractError, match="expected one"):
        meets("device.capacity['d'].memory.isLessThan(quantity('3'))", found[0])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"allocationMode": "Half"}, id="unknown mode"),
        pytest.param({"deviceClassName": "other"}, id="unknown class"),
    ],
)
def test_claims_beyond_the_search_are_errors_not_predictions(change):
    exactly = {"deviceClassName": "c", **change}
    claim = {"spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}}
    with pytest.raises(ContractError):
        claim_of(claim, {"c": {"spec": {}}})


ALL = Request("all", amounts={"memory": Fraction(1)}, takes_all=True)
FULL = {("d", "p", "gpu-0"): {"memory": Fraction(10)}}


@pytest.mark.parametrize(
    ("usage", "besides", "found"),
    [
        pytest.param(Usage(), (), ["gpu-0", "gpu-1"], id="free devices"),
        pytest.param(Usage(consumed=FULL), (), ["gpu-1"], id="full device is none of all"),
        pytest.param(Usage(), (asks(10),), None, id="another claim takes a device first"),
    ],
)
def test_request_for_all_devices_gets_each_or_none(usage: Usage, besides: Sequence[Claim], found: list[str] | None):
    taken = names(*besides, Claim(((ALL,),)), usage=usage)
    assert (None if taken is None else taken[-1]) == found


def test_request_for_all_devices_of_a_kind_without_devices_fits_nowhere():
    assert names(Claim(((ALL,),)), devices=0) is None


def test_all_devices_that_a_constraint_excludes_are_an_error_not_a_prediction():
    devices = [Device(("d", "p", f"gpu-{number}"), attributes={"d/numa": ("int", number)}) for number in range(2)]
    claim = Claim(((Request("all", takes_all=True),),), (Match("d/numa"),))
    with pytest.raises(ContractError, match="excludes device gpu-1"):
        predict(devices, Usage(), [claim], lambda *_: True)


@pytest.mark.parametrize("change", [{"resourceSliceCount": 2}, {"generation": 2, "resourceSliceCount": 2}])
def test_all_devices_of_an_incomplete_pool_are_an_error_not_a_prediction(change: Mapping[str, Any]):
    one = slice_with({"name": "gpu-0"})
    check_whole("n", [one])
    one["spec"]["pool"].update(change)
    with pytest.raises(ContractError, match="incomplete"):
        check_whole("n", [one])


def test_admin_access_uses_device_of_another_claim_once():
    device = Device(("d", "p", "gpu-0"))
    admin, plain = Request("r", is_admin=True), Request("r")
    used = Usage(frozenset({device.key}))

    def fits(*requests: Request) -> bool:
        claim = Claim(tuple((request,) for request in requests))
        return predict([device], used, [claim], lambda *_: True) is not None

    assert (fits(plain), fits(admin), fits(admin, admin)) == (False, True, False)


def counters(**values):
    return {name: {"value": str(value)} for name, value in values.items()}


def gpu(name="gpu", *, shared=True, of="set", **draws):
    draw = [{"counterSet": of, "counters": counters(**draws)}] if draws else []
    return {"name": name, "allowMultipleAllocations": shared, "capacity": {"memory": {"value": "8"}}, "consumesCounters": draw}


def pool(*listed, driver="d", sets=("set",), nodes=("n",), **values):
    """The slices of a pool: the sets of counters, and devices on each of the nodes."""
    contents = [{"sharedCounters": [{"name": name, "counters": counters(**values)} for name in sets]}]
    contents += [{"devices": [{**one, "name": f"{one['name']}-{node}"} for one in listed]} for node in nodes]
    return [
        {
            "metadata": {"name": f"{driver}-{number}"},
            "spec": {
                "driver": driver, "nodeName": node, "pool": {"name": "p", "resourceSliceCount": len(contents)}, **content,
            },
        }
        for number, (node, content) in enumerate(zip(("n", *nodes), contents, strict=True))
    ]  # fmt: skip


def taken_of(slices, count, usage=None):
    """The names of the devices that a request for so many, and 2 bytes of each, gets."""
    found = predict(devices_of("n", slices), usage or Usage(), [asks(2, count)], lambda *_: True)
    return None if found is None else [one.device[2] for one in found[0]]


class TestCounters:
    def test_device_that_draws_more_than_is_left_is_passed_over(self):
        slices = pool(gpu("a", shared=False, m=3), gpu("b", shared=False, m=2), gpu("c", shared=False, m=1), m=4)
        assert taken_of(slices, 2) == ["a-n", "c-n"]

    def test_use_by_other_claims_counts(self):
        slices = pool(gpu("a", shared=False, m=3), gpu("b", shared=False, m=2), m=4)
        assert taken_of(slices, 1, Usage(frozenset({("d", "p", "b-n")}))) is None

    def test_device_in_shared_use_draws_once(self):
        slices = pool(gpu("a", m=4), m=4)
        assert taken_of(slices, 1, Usage(consumed={("d", "p", "a-n"): {"memory": Fraction(2)}})) == ["a-n"]

    def test_search_gives_back_what_it_drew(self):
        """The first device leaves nothing for a second one."""
        slices = pool(gpu("a", shared=False, m=4), gpu("b", shared=False, m=2), gpu("c", shared=False, m=2), m=4)
        assert taken_of(slices, 2) == ["b-n", "c-n"]

    def test_no_device_of_overused_pool_can_draw(self):
        slices = pool(gpu("a", shared=False, m=5), gpu("b", shared=False, o=1), gpu("c", shared=False), m=4, o=1)
        assert taken_of(slices, 1, Usage(frozenset({("d", "p", "a-n")}))) == ["c-n"]

    @pytest.mark.parametrize(
        "slices",
        [
            pytest.param(pool(gpu(of="other", m=1), m=1), id="unknown set"),
            pytest.param(pool(gpu(o=1), m=1), id="unknown counter"),
            pytest.param(pool(gpu(m=1), sets=("set", "set"), m=1), id="two sets of one name"),
            pytest.param(pool(gpu(m=1), m=1)[1:], id="counters are missing"),
        ],
    )
    def test_pool_with_wrong_counters_is_left_out(self, slices):
        assert devices_of("n", slices) == []

    @pytest.mark.parametrize(
        "slices",
        [
            pytest.param(pool(gpu(m=1), nodes=("n", "other"), m=1), id="devices of other nodes draw, too"),
            pytest.param([*pool(gpu(m=1), m=1), *pool(gpu(m=1), driver="e", m=1)], id="two drivers with one name of a pool"),
        ],
    )
    def test_counters_that_are_not_predicted_are_errors(self, slices):
        with pytest.raises(ContractError, match="counters"):
            devices_of("n", slices)
