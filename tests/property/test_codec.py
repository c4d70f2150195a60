# SPDX-License-Identifier: Apache-2.0
"""Round trips of every text form, and hostile text that must surface as a ContractError and nothing else."""

import json
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from aliquot.contract import codec, units
from aliquot.contract.errors import ContractError
from aliquot.contract.model import ContainerAssignment, DeviceShare, PodAssignment

hex_digits = st.text("0123456789abcdef-", min_size=1, max_size=36)
uuids = st.builds("{}-{}".format, st.sampled_from(["GPU", "MIG"]), hex_digits)
mib = st.integers(1, 1 << 30)
shares = st.builds(DeviceShare, uuids, mib.map(units.mib_to_bytes), st.none() | st.integers(1, 100))
containers = st.builds(
    ContainerAssignment,
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True),
    st.lists(shares, min_size=1, max_size=16, unique_by=lambda share: share.device_uuid).map(tuple),
)
assignments = st.builds(
    PodAssignment,
    st.uuids().map(str),
    st.lists(containers, min_size=1, max_size=6, unique_by=lambda container: container.container).map(tuple),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: (
        st.lists(values) | st.dictionaries(st.sampled_from(["v", "uid", "containers", "name", "devices", "uuid", "mib", "cores"]), values)
    ),
    max_leaves=20,
)


@given(assignments)
def test_an_assignment_survives_its_annotation(assignment):
    assert codec.decode_assignment(codec.encode_assignment(assignment), pod_uid=assignment.pod_uid) == assignment


@given(assignments)
def test_an_annotation_is_ascii_json_without_blanks(assignment):
    text = codec.encode_assignment(assignment)
    assert text == json.dumps(json.loads(text), separators=(",", ":"))


@given(assignments, st.integers(0), st.integers(0), st.binary(max_size=4))
def test_a_damaged_annotation_decodes_to_a_valid_one_or_is_refused(assignment, start, length, replacement):
    raw = codec.encode_assignment(assignment).encode()
    start %= len(raw)
    damaged = (raw[:start] + replacement + raw[start + length % 8 :]).decode(errors="surrogateescape")
    with suppress(ContractError):
        decoded = codec.decode_assignment(damaged, pod_uid=assignment.pod_uid)
        assert codec.decode_assignment(codec.encode_assignment(decoded), pod_uid=assignment.pod_uid) == decoded


@given(st.text() | json_values.map(json.dumps) | json_values.map(lambda value: json.dumps({"v": 1, "uid": "u", "containers": value})))
def test_hostile_annotations_raise_nothing_but_contract_errors(text):
    with suppress(ContractError):
        codec.decode_assignment(text, pod_uid="u")


@given(st.builds("GPU-{}".format, hex_digits), st.integers(0, 9999))
def test_a_replica_id_survives(uuid, number):
    assert codec.decode_replica(codec.encode_replica(uuid, number)) == (uuid, number)


@given(st.text() | st.builds("GPU-{}::{}".format, st.text(), st.text()))
def test_a_hostile_id_is_refused_or_is_exactly_what_it_decodes_to(text):
    with suppress(ContractError):
        assert codec.encode_replica(*codec.decode_replica(text)) == text


@given(st.lists(st.text(min_size=1).map(str.strip).filter(lambda item: item and "," not in item), min_size=1, max_size=20).map(tuple))
def test_a_comma_list_survives(items):
    with suppress(ContractError):  # longer than a list may be
        assert codec.decode_list(codec.encode_list(items)) == items


@given(st.text())
def test_hostile_lists_have_no_empty_items(text):
    with suppress(ContractError):
        assert all(codec.decode_list(text))


@given(st.text() | st.from_regex(r"[+-]?[0-9]{0,30}\.?[0-9]{0,30}([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?", fullmatch=True))
def test_hostile_quantities_raise_nothing_but_contract_errors(text):
    for parse in (units.parse_quantity, units.parse_count, units.parse_memory_bytes, units.parse_percent):
        with suppress(ContractError):
            assert parse(text) <= units.MAX_QUANTITY


@given(mib)
def test_memory_survives_the_resource_form(amount):
    memory_bytes = units.mib_to_bytes(amount)
    assert units.parse_memory_bytes(units.format_mib(memory_bytes)) == memory_bytes
    assert units.parse_memory_bytes(f"{amount}Mi") == memory_bytes
