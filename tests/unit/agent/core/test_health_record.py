# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.core.health import Answer, HealthRules, HealthState, HealthTable, Silence
from agent.core.health_record import decode_health, encode_health, lasting_part
from agent.errors import StorageError

RULES = HealthRules()


def table() -> HealthTable:
    ill = HealthTable().after_xids([("GPU-0", 62), ("GPU-1", 92)], 100, RULES)
    return ill.after_probes({"GPU-0": Answer(uncorrected_errors=3), "GPU-2": Silence("it hangs"), "GPU-3": Answer()}, 101, RULES)


def test_health_survives_restart_and_clean_time_restarts():
    before = table()
    after = decode_health(encode_health(lasting_part(before)))
    assert {uuid: gpu.state for uuid, gpu in after.gpus.items()} == {uuid: gpu.state for uuid, gpu in before.gpus.items()}
    assert before.of("GPU-0").clean_since == 101
    assert after.of("GPU-0").clean_since is None
    assert (after.of("GPU-0").reason, after.of("GPU-0").uncorrected_errors) == (before.of("GPU-0").reason, 3)
    assert after.of("GPU-1").signs == (100,)
    assert lasting_part(after) == lasting_part(before)


def test_a_quarantine_lasts_its_time_over_a_restart():
    after = decode_health(encode_health(lasting_part(table())))
    for now, state in ((400, HealthState.QUARANTINED), (699, HealthState.RECOVERING), (700, HealthState.HEALTHY)):
        after = after.after_probes({"GPU-0": Answer(uncorrected_errors=3)}, now, RULES)
        assert after.of("GPU-0").state is state


def test_reading_a_healthy_gpu_changes_no_record():
    once = HealthTable().after_probes({"GPU-0": Answer(uncorrected_errors=0)}, 1, RULES)
    assert lasting_part(once.after_probes({"GPU-0": Answer(uncorrected_errors=0)}, 2, RULES)) == lasting_part(once)


@pytest.mark.parametrize("content", [b"", b"{", b'{"version":2,"gpus":{}}', b'{"version":1,"gpus":{"GPU-0":{"state":"well"}}}', b"\xff"])
def test_a_damaged_record_is_refused(content):
    with pytest.raises(StorageError):
        decode_health(content)
