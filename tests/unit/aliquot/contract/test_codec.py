# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from aliquot.contract import codec
from aliquot.contract.errors import ContractError, QuantityError, StaleAssignmentError
from aliquot.contract.model import ContainerAssignment, DeviceShare, PodAssignment
from aliquot.contract.units import GIB, MIB

GPU = "GPU-1b2c3d4e-0000-1111-2222-333344445555"
MIG = "MIG-1b2c3d4e-0000-1111-2222-333344445555"


def make_assignment(*shares: DeviceShare, pod_uid="uid-1", container="main") -> PodAssignment:
    return PodAssignment(pod_uid, (ContainerAssignment(container, shares or (DeviceShare(GPU, 4 * GIB, 50),)),))


def make_form(**changes) -> dict:
    return {"v": 1, "uid": "uid-1", "containers": [{"name": "main", "devices": [{"uuid": GPU, "mib": 4096, "cores": 50}]}]} | changes


def decode(form: object) -> PodAssignment:
    return codec.decode_assignment(form if isinstance(form, str) else json.dumps(form), pod_uid="uid-1")


def test_the_annotation_is_compact_versioned_json():
    text = codec.encode_assignment(make_assignment(DeviceShare(GPU, 4 * GIB, 50), DeviceShare(MIG, 10 * GIB)))
    assert text == (
        f'{{"v":1,"uid":"uid-1","containers":[{{"name":"main","devices":[{{"uuid":"{GPU}","mib":4096,"cores":50}},{{"uuid":"{MIG}","mib":10240}}]}}]}}'
    )


def test_an_assignment_of_another_pod_uid_is_stale():
    text = codec.encode_assignment(make_assignment(pod_uid="uid-old"))
    with pytest.raises(StaleAssignmentError, match="'uid-1', found one for 'uid-old'"):
        codec.decode_assignment(text, pod_uid="uid-1")


def test_fields_of_later_minor_versions_are_ignored():
    form = make_form(hint={"x": [1]})
    form["containers"][0]["devices"][0]["numa"] = 1
    assert decode(form) == make_assignment()


def test_later_version_is_refused_in_any_format():
    with pytest.raises(ContractError, match="version 1, found version 2: upgrade"):
        decode({"v": 2, "somewhere": "else"})


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="cut off"),
        pytest.param("null", id="null"),
        pytest.param("[]", id="array"),
        pytest.param("[" * 60_000, id="deep array"),
        pytest.param('{"v":1,"x":' + "[" * 60_000, id="deep unknown field"),
        pytest.param('"\ud800"', id="lone surrogate"),
        pytest.param('{"v":NaN}', id="NaN"),
        pytest.param({"v": True}, id="bool for version"),
        pytest.param({"v": "1"}, id="text for version"),
        pytest.param({}, id="no version"),
        pytest.param({"v": 1}, id="nothing else"),
        pytest.param(make_form(uid=""), id="empty uid"),
        pytest.param(make_form(uid="../../etc"), id="uid with slashes"),
        pytest.param(make_form(containers=[]), id="no containers"),
        pytest.param(make_form(containers=[{"name": "main", "devices": []}]), id="no devices"),
        pytest.param(make_form(containers=make_form()["containers"] * 2), id="container twice"),
        pytest.param(make_form(containers=[{"name": "Main\n", "devices": [{"uuid": GPU, "mib": 1}]}]), id="container name"),
    ],
)
def test_text_that_is_no_assignment_is_refused(form):
    with pytest.raises(ContractError):
        decode(form)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param({"uuid": GPU}, id="no memory"),
        pytest.param({"uuid": GPU, "mib": 0}, id="zero memory"),
        pytest.param({"uuid": GPU, "mib": -1}, id="negative memory"),
        pytest.param({"uuid": GPU, "mib": 1.5}, id="fraction"),
        pytest.param({"uuid": GPU, "mib": 10**40}, id="huge memory"),
        pytest.param({"uuid": GPU, "mib": "4096"}, id="text for memory"),
        pytest.param({"uuid": GPU, "mib": 1, "cores": 0}, id="zero cores"),
        pytest.param({"uuid": GPU, "mib": 1, "cores": 101}, id="more than a GPU"),
        pytest.param({"uuid": "", "mib": 1}, id="empty uuid"),
        pytest.param({"uuid": "GPU-../../x", "mib": 1}, id="uuid with slashes"),
        pytest.param({"uuid": "GPU-" + "a" * 100, "mib": 1}, id="long uuid"),
        pytest.param({"uuid": "0", "mib": 1}, id="index"),
    ],
)
def test_a_device_that_no_scheduler_writes_is_refused(device):
    with pytest.raises(ContractError):
        decode(make_form(containers=[{"name": "main", "devices": [device]}]))


def test_a_device_named_twice_is_refused():
    device = {"uuid": GPU, "mib": 1}
    with pytest.raises(ContractError, match="every device once"):
        decode(make_form(containers=[{"name": "main", "devices": [device, device]}]))


def test_more_devices_than_a_container_can_use_are_refused():
    devices = [{"uuid": f"GPU-{i}", "mib": 1} for i in range(17)]
    with pytest.raises(ContractError):
        decode(make_form(containers=[{"name": "main", "devices": devices}]))


def test_an_oversized_annotation_is_refused_before_it_is_parsed():
    with pytest.raises(ContractError, match="at most 65536 characters"):
        decode(" " * 65_536 + json.dumps(make_form()))


def test_an_assignment_that_would_not_fit_its_annotation_is_not_written():
    shares = tuple(DeviceShare(f"GPU-{i:064}", GIB) for i in range(16))
    containers = tuple(ContainerAssignment(f"c{i}", shares) for i in range(60))
    with pytest.raises(ContractError, match="at most 65536 characters"):
        codec.encode_assignment(PodAssignment("uid-1", containers))


def test_memory_that_is_not_whole_mib_is_not_written():
    with pytest.raises(QuantityError):
        codec.encode_assignment(make_assignment(DeviceShare(GPU, GIB + 1)))


@pytest.mark.parametrize(
    "share", [DeviceShare(GPU, 0), DeviceShare(GPU, MIB, 0), DeviceShare(GPU, MIB, 101), DeviceShare("gpu", MIB), DeviceShare(GPU, 1 << 60)]
)
def test_a_share_that_no_decoder_takes_is_not_written(share):
    with pytest.raises(ContractError):
        codec.encode_assignment(make_assignment(share))


def test_an_old_style_mig_uuid_is_a_device_uuid():
    codec.check_device_uuid(f"MIG-{GPU}/7/0")  # raises for what is none


def test_a_replica_id_joins_uuid_and_number():
    assert codec.encode_replica(GPU, 12) == f"{GPU}::12"
    assert codec.decode_replica(f"{GPU}::12") == codec.Replica(GPU, 12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        GPU,
        f"{GPU}::",
        f"{GPU}::-1",
        f"{GPU}::+1",
        f"{GPU}::01",
        f"{GPU}::1 ",
        f"{GPU}::1::2",
        f"{GPU}::10000",
        "::1",
        "x::1",
        f"{GPU}::٣",
        GPU * 9 + "::1",
    ],
)
def test_an_id_that_no_agent_offers_is_refused(text):
    with pytest.raises(ContractError):
        codec.decode_replica(text)


@pytest.mark.parametrize(("uuid", "number"), [(GPU, -1), (GPU, 10_000), ("", 0), ("a::b", 0), ("GPU-" + "a" * 60, 1)])
def test_an_id_the_kubelet_cannot_take_is_not_written(uuid, number):
    with pytest.raises(ContractError):
        codec.encode_replica(uuid, number)


def test_blanks_around_list_items_are_ignored():
    assert codec.decode_list(" A100 ,H100 SXM") == ("A100", "H100 SXM")


@pytest.mark.parametrize("text", ["", " ", ",", "a,", ",a", "a,,b", "a" * 5000])
def test_an_empty_or_endless_list_is_refused(text):
    with pytest.raises(ContractError):
        codec.decode_list(text)


@pytest.mark.parametrize("items", [(), ("",), ("a,b",), (" a",), ("a", "")])
def test_items_that_would_not_come_back_are_not_written(items):
    with pytest.raises(ContractError):
        codec.encode_list(items)


class TestMigPlaces:
    @pytest.mark.parametrize("place", [codec.MigPlace("GPU-1b2c", "1g.10gb", 0), codec.MigPlace("GPU-1b2c-3d", "1g.24gb+me.all", 12)])
    def test_a_place_is_read_as_it_was_written(self, place):
        assert codec.decode_place(str(place)) == place
        codec.check_device_uuid(str(place))

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "GPU-1b2c",
            "MIG-1b2c/1g.10gb@0",
            "GPU-1b2c/1g.10gb",
            "GPU-1b2c/1g.10gb@",
            "GPU-1b2c/1g.10gb@00",
            "GPU-1b2c/1g 10gb@0",
            "GPU-1b2c/1/2",
        ],
    )
    def test_anything_else_is_no_place(self, text):
        assert codec.decode_place(text) is None

    def test_a_share_may_name_a_place(self):
        share = DeviceShare("GPU-1b2c/1g.10gb+me@3", 9728 * MIB)
        assignment = PodAssignment("uid", (ContainerAssignment("main", (share,)),))
        assert codec.decode_assignment(codec.encode_assignment(assignment), pod_uid="uid") == assignment
