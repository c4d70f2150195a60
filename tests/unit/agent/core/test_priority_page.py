import os
import subprocess
from pathlib import Path

import pytest

from agent.core import priority_page

ROOT = Path(__file__).resolve().parents[4]
C_PROGRAM = """
#include <stddef.h>
#include <stdio.h>
#include "limit/priority.h"
int main(void)
{
    printf("%llu %u %zu %zu %zu\\n", (unsigned long long)AQ_PRIORITY_MAGIC, AQ_PRIORITY_LINES, sizeof(struct aq_priority_line),
           sizeof(struct aq_priority_page), offsetof(struct aq_priority_page, line));
    return 0;
}
"""


def test_the_page_is_the_one_of_the_header(tmp_path):
    source = tmp_path / "print.c"
    source.write_text(C_PROGRAM)
    program = tmp_path / "print"
    subprocess.run([os.environ.get("CC", "cc"), "-std=gnu11", f"-I{ROOT}/cuda_shim", "-o", program, source], check=True)
    magic, lines, line_bytes, page_bytes, first_line = map(int, subprocess.check_output([program]).split())
    assert magic == priority_page.PRIORITY_MAGIC
    assert lines == priority_page.PRIORITY_LINES
    assert line_bytes == first_line == priority_page.PRIORITY_LINE_BYTES
    assert page_bytes == priority_page.PRIORITY_BYTES == len(priority_page.empty_page())


def test_a_fresh_page_wants_no_device():
    assert priority_page.is_page(priority_page.empty_page())
    assert not any(priority_page.empty_page()[8:])


@pytest.mark.parametrize("content", [b"", b"\0" * priority_page.PRIORITY_BYTES, priority_page.empty_page() + b"\0"])
def test_anything_else_is_not_a_page(content):
    assert not priority_page.is_page(content)


def test_every_device_has_a_line_of_its_own_as_far_as_there_are_lines():
    lines = [priority_page.line_of(minor) for minor in range(priority_page.PRIORITY_LINES)]
    assert lines == list(range(1, priority_page.PRIORITY_LINES + 1))
    assert priority_page.line_of(priority_page.PRIORITY_LINES) == 0
