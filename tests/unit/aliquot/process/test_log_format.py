# SPDX-License-Identifier: Apache-2.0
import json
import logging

from aliquot.process.log_format import JsonFormatter, TextFormatter


def record(**extra) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "agent", "levelname": "INFO", "msg": "granted %s", "args": ("GPU-0",), **extra})


def test_a_json_line_has_the_message_and_its_keys():
    line = json.loads(JsonFormatter().format(record(pod="default/a", pod_uid=None)))
    assert (line["message"], line["level"], line["pod"]) == ("granted GPU-0", "info", "default/a")
    assert "pod_uid" not in line


def test_a_text_line_is_for_reading():
    assert TextFormatter().format(record(pod="default/a")).endswith("INFO    granted GPU-0 pod=default/a")
