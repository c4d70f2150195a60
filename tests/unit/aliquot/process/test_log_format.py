# SPDX-License-Identifier: Apache-2.0
import json
import logging
import signal
import subprocess
import sys

import pytest

from aliquot.process.log_format import JsonFormatter, TextFormatter
from aliquot.process.settings import LogFormat


def record(**extra) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "agent", "levelname": "INFO", "msg": "granted %s", "args": ("GPU-0",), **extra})


def test_a_json_line_has_the_message_and_its_keys():
    line = json.loads(JsonFormatter().format(record(pod="default/a", pod_uid=None)))
    assert (line["message"], line["level"], line["pod"]) == ("granted GPU-0", "info", "default/a")
    assert "pod_uid" not in line


def test_a_text_line_is_for_reading():
    assert TextFormatter().format(record(pod="default/a")).endswith("INFO    granted GPU-0 pod=default/a")


@pytest.mark.parametrize("form", LogFormat)
def test_a_crash_in_native_code_writes_the_stacks(form):
    program = f"""
import ctypes
from aliquot.process.log_format import configure_logging
from aliquot.process.settings import LogFormat, LogLevel
configure_logging(LogLevel.INFO, LogFormat("{form}"))
def reads_what_is_not_mapped():
    ctypes.string_at(8)
reads_what_is_not_mapped()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGSEGV
    assert "in reads_what_is_not_mapped" in ended.stderr
