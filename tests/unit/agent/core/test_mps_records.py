# SPDX-License-Identifier: Apache-2.0
import hashlib
import json

import pytest

from agent.core.mps_records import (
    DAEMON_REQUESTS,
    DAEMON_STATES,
    SUPERVISOR_STATES,
    DaemonRequest,
    DaemonState,
    SupervisorState,
    file_of,
    gpu_of_file,
)
from agent.errors import StorageError

UUID = "GPU-6f0a4a52-8f5e-5f6c-2a1d-9b770c3c9f4e"
ROWS = [
    pytest.param(DAEMON_REQUESTS, DaemonRequest(UUID, {"grant": "generation"}), id="wish"),
    pytest.param(DAEMON_STATES, DaemonState(UUID, "generation", 41, 1.5, "trouble"), id="daemon"),
    pytest.param(DAEMON_STATES, DaemonState(UUID), id="no daemon"),
    pytest.param(SUPERVISOR_STATES, SupervisorState(50, "/run/aliquot/mps-shm", "trouble"), id="supervisor"),
]


@pytest.mark.parametrize(("rows", "value"), ROWS)
def test_what_is_written_is_read(rows, value):
    assert rows.decode(rows.encode(value)) == value


@pytest.mark.parametrize(("rows", "value"), ROWS)
def test_another_version_is_refused_with_both(rows, value):
    line = json.loads(rows.encode(value))
    line["version"] = 7
    with pytest.raises(StorageError, match="of version 1, found version 7"):
        rows.decode(json.dumps(line).encode())


def test_a_field_of_a_later_release_is_left_out():
    body = json.dumps({"device_uuid": UUID, "clients": {}, "later": 1})
    line = json.dumps({"version": 1, "sha256": hashlib.sha256(body.encode()).hexdigest(), "wish": None}).replace("null", body)
    assert DAEMON_REQUESTS.decode(line.encode()) == DaemonRequest(UUID)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff", b"[1]", DAEMON_REQUESTS.encode(DaemonRequest(UUID)), DAEMON_STATES.encode(DaemonState(UUID))[:-9]]
)
def test_invalid_state_is_refused(content):
    with pytest.raises(StorageError):
        DAEMON_STATES.decode(content)


def test_a_file_is_named_after_its_gpu():
    assert gpu_of_file(file_of(UUID)) == UUID


@pytest.mark.parametrize("name", ["notes.txt", UUID, "MIG-1.json", "GPU-.json", "GPU-../x.json", f".{UUID}.json", f"{UUID}.json.json"])
def test_other_names_are_no_gpus(name):
    assert gpu_of_file(name) is None
