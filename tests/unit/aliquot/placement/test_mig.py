# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable
from dataclasses import replace

import pytest

from aliquot.contract.errors import ContractError
from aliquot.contract.model import DeviceShare, MediaEngines, MigInstance
from aliquot.contract.units import MIB
from aliquot.placement import mig
from aliquot.placement.device import DeviceState
from tests.unit.aliquot.placement.builders import SHAPES, empty, make_device, make_instance, names, partitioned, starts


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("1g.10gb", mig.MigProfile(1, 1, 10)),
        ("7g.141gb", mig.MigProfile(7, 7, 141)),
        ("1c.3g.40gb", mig.MigProfile(1, 3, 40)),
        ("1g.5gb+me", mig.MigProfile(1, 1, 5, "+me")),
        ("1g.24gb+me.all", mig.MigProfile(1, 1, 24, "+me.all")),
        ("1g.24gb-me", mig.MigProfile(1, 1, 24, "-me")),
    ],
)
def test_a_profile_is_read_and_written_as_nvml_names_it(name, want):
    assert mig.parse_profile(name) == want
    assert str(want) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1g",
        "1g.gb",
        "10gb",
        "1g.10GB",
        "0g.10gb",
        "01g.10gb",
        "1g.10gb+",
        "1g.10gb+ME",
        "1g.10gb\n",
        " 1g.10gb",
        "g.10gb",
        "1g.99999gb",
    ],
)
def test_what_is_no_profile_is_refused(name):
    with pytest.raises(ContractError, match="expected a MIG profile"):
        mig.parse_profile(name)


@pytest.mark.parametrize(
    ("profile", "resource"),
    [
        ("1g.10gb", "nvidia.com/mig-1g.10gb"),
        ("1g.10gb+me", "nvidia.com/mig-1g.10gb.me"),
        ("1g.24gb+me.all", "nvidia.com/mig-1g.24gb.me.all"),
        ("1g.24gb-me", "nvidia.com/mig-1g.24gb-me"),
        ("1c.3g.40gb", "nvidia.com/mig-1c.3g.40gb"),
    ],
)
def test_a_profile_and_its_resource_name_each_other(profile, resource):
    assert mig.resource_of_profile(profile) == resource
    assert mig.profile_of_resource(resource) == profile


@pytest.mark.parametrize(
    "resource", ["nvidia.com/vgpu", "1g.10gb", "nvidia.com/mig-", "nvidia.com/mig-1g.10gb.ME", "nvidia.com/mig-1g.10gb+me+x"]
)
def test_a_resource_that_asks_for_no_profile_is_refused(resource):
    with pytest.raises(ContractError):
        mig.profile_of_resource(resource)


def test_free_instances_come_in_order_of_their_place():
    assert names(mig.free_instances(partitioned(0, 4, 1), "1g.10gb")) == ["MIG-0-0", "MIG-0-2", "MIG-0-3"]


# --- made on demand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "profile", "want"),
    [
        ((), "3g.40gb", [0, 4]),
        (("GPU-0/1g.10gb@5",), "3g.40gb", [0]),
        (("GPU-0/3g.40gb@0",), "1g.10gb", [4, 5, 6]),
        (("GPU-0/7g.80gb@0",), "1g.10gb", []),
        (("GPU-0/1g.10gb+me@6",), "1g.10gb+me", []),
    ],
)
def test_a_place_is_free_while_nothing_promised_overlaps_it(used, profile, want):
    assert starts(mig.free_instances(empty(used=used), profile)) == want


def test_an_instance_that_exists_takes_its_place_and_is_itself_free():
    state = empty(0, make_instance(0, 2))
    assert names(mig.free_instances(state, "1g.10gb"))[:3] == ["GPU-0/1g.10gb@0", "GPU-0/1g.10gb@1", "MIG-0-2"]
    assert starts(mig.free_instances(state, "3g.40gb")) == [4]


def test_an_instance_that_appeared_on_a_promised_place_is_not_free():
    state = empty(0, make_instance(0, 2), used=("GPU-0/1g.10gb@2",))
    assert "MIG-0-2" not in names(mig.free_instances(state, "1g.10gb"))


def test_compute_instances_of_one_gpu_instance_are_free_separately():
    pair = tuple(replace(make_instance(0, index, profile="1c.2g.20gb"), placement_start=0, placement_size=2) for index in range(2))
    state = DeviceState.of(make_device(0, mig=pair), [DeviceShare("MIG-0-0", MIB)])
    assert names(mig.free_instances(state, "1c.2g.20gb")) == ["MIG-0-1"]
    assert mig.room(DeviceState.of(make_device(0, mig=pair)), "1c.2g.20gb") == 2


@pytest.mark.parametrize(
    ("used", "profile", "want"), [((), "1g.10gb", 7), ((), "2g.20gb", 3), (("GPU-0/1g.10gb@4",), "2g.20gb", 2), ((), "7g.80gb", 1)]
)
def test_the_room_for_a_profile_is_how_many_fit_together(used, profile, want):
    assert mig.room(empty(used=used), profile) == want


@pytest.mark.parametrize(
    ("used", "free"),
    [((), 8), (("GPU-0/1g.10gb@4",), 7), (("GPU-0/3g.40gb@0", "GPU-0/2g.20gb@4"), 2), (("GPU-0/7g.80gb@0",), 0)],
)
def test_places_have_the_slices_they_cover_together(used, free):
    state = empty(used=used)
    assert mig.slices(state.device.mig_instances, state.used_instances) == (8, free)


@pytest.mark.parametrize(
    ("used", "free"),
    [((), 8), (("MIG-0-2",), 7), (("GPU-0/1g.10gb@2",), 7), (("GPU-0/1g.10gb@3",), 7), (("MIG-0-2", "GPU-0/3g.40gb@4"), 3)],
)
def test_an_instance_that_exists_has_slices_of_its_own_among_the_places(used, free):
    state = empty(0, make_instance(0, 2), used=used)
    assert mig.slices(state.device.mig_instances, state.used_instances) == (8, free)


def test_compute_instances_of_one_gpu_instance_count_its_slices_each():
    pair = tuple(replace(make_instance(0, index, profile="1c.2g.20gb"), placement_start=0, placement_size=2) for index in range(2))
    assert mig.slices(pair, {"MIG-0-1"}) == (4, 2)


def test_a_profile_takes_the_slices_of_its_smallest_instance():
    assert mig.sizes(empty().device.mig_instances) == {profile: size for profile, (size, _, _) in SHAPES.items()}


# --- media engines --------------------------------------------------------------------------------------------------

A30 = {
    "1g.6gb": (1, 4, range(4), MediaEngines(1)),
    "1g.6gb+me": (1, 1, range(4), MediaEngines(1, 0, 1, 1)),
    "2g.12gb": (2, 2, (0, 2), MediaEngines(2)),
    "2g.12gb+me": (2, 1, (0, 2), MediaEngines(2, 0, 1, 1)),
    "4g.24gb": (4, 1, (0,), MediaEngines(4, 0, 1, 1)),
}
"""Size in memory slices, how many at most, where they may begin, and what it takes of four decoders, one JPEG engine and one OFA."""


def a30(*existing: MigInstance, used: Iterable[str] = (), reported: bool = True) -> DeviceState:
    places = [
        MigInstance(f"GPU-0/{profile}@{start}", "GPU-0", profile, MIB, 0, 0, start, size, most, engines if reported else None)
        for profile, (size, most, starts, engines) in A30.items()
        for start in starts
    ]
    return DeviceState.of(make_device(0, mig=(*existing, *places)), [DeviceShare(name, MIB) for name in used])


def rooms_of(state: DeviceState) -> dict[str, int]:
    return dict(mig.rooms(state.device.mig_instances, state.used_instances))


def test_profiles_that_take_the_same_media_engine_are_not_offered_together():
    assert rooms_of(a30(used=["GPU-0/1g.6gb+me@0"])) == {"1g.6gb": 3, "1g.6gb+me": 0, "2g.12gb": 1, "2g.12gb+me": 0, "4g.24gb": 0}
    assert mig.free_instances(a30(used=["GPU-0/1g.6gb+me@0"]), "2g.12gb+me") == ()


def test_an_instance_that_somebody_made_has_its_engines():
    assert rooms_of(a30(make_instance(0, 0, profile="2g.12gb+me")))["1g.6gb+me"] == 0


def test_compute_instances_of_one_gpu_instance_have_its_engines_once():
    pair = [replace(make_instance(0, index, profile="1c.2g.12gb"), placement_start=0, placement_size=2) for index in range(2)]
    assert rooms_of(a30(*pair))["2g.12gb"] == 1


def test_unreported_engines_are_no_limit():
    assert rooms_of(a30(used=["GPU-0/1g.6gb+me@0"], reported=False))["2g.12gb+me"] == 1
