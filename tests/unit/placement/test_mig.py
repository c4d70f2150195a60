import pytest

from placement import mig
from placement.device import DeviceState
from proto.errors import ContractError
from proto.model import DeviceShare
from proto.units import MIB
from tests.unit.placement.builders import make_device, make_instance


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


def partitioned(parent: int, count: int, *used: int) -> DeviceState:
    device = make_device(parent, mig=tuple(make_instance(parent, index) for index in reversed(range(count))))
    return DeviceState.of(device, [DeviceShare(f"MIG-{parent}-{index}", MIB) for index in used])


def names(instances):
    return [instance.uuid for instance in instances]


def test_free_instances_come_in_order_of_their_place():
    assert names(mig.free_instances(partitioned(0, 4, 1), "1g.10gb")) == ["MIG-0-0", "MIG-0-2", "MIG-0-3"]


def test_instances_are_packed_on_the_device_most_in_use():
    states = [partitioned(0, 3), partitioned(1, 3, 0), partitioned(2, 3)]
    assert names(mig.choose_instances(states, "1g.10gb", 3, spread=False)) == ["MIG-1-1", "MIG-1-2", "MIG-0-0"]


def test_instances_are_spread_over_devices_when_asked():
    states = [partitioned(0, 3, 0), partitioned(1, 3), partitioned(2, 3)]
    assert names(mig.choose_instances(states, "1g.10gb", 4, spread=True)) == ["MIG-1-0", "MIG-2-0", "MIG-0-1", "MIG-1-1"]


def test_preferred_instances_come_first():
    states = [partitioned(0, 3, 0), partitioned(1, 3)]
    assert names(mig.choose_instances(states, "1g.10gb", 2, spread=False, preferred_uuids={"MIG-1-2"})) == ["MIG-1-2", "MIG-0-1"]


def test_too_few_instances_are_none():
    assert mig.choose_instances([partitioned(0, 2)], "1g.10gb", 3, spread=False) is None
    assert mig.choose_instances([partitioned(0, 2)], "2g.20gb", 1, spread=False) is None
