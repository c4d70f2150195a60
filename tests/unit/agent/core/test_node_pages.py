# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
from pathlib import Path

import pytest

from agent.core.node_pages import LINES, MAGIC_BYTES, PRIORITY, TURNS, line_of

ROOT = Path(__file__).resolve().parents[4]
C_PROGRAM = """
#include <stddef.h>
#include <stdio.h>
#include "limit/%(name)s.h"
int main(void)
{
    printf("%%llu %%u %%zu %%zu %%zu\\n", (unsigned long long)AQ_%(upper)s_MAGIC, AQ_%(upper)s_LINES, sizeof(struct aq_%(name)s_line),
           sizeof(struct aq_%(name)s_page), offsetof(struct aq_%(name)s_page, line));
    return 0;
}
"""
both = pytest.mark.parametrize("page", [pytest.param(PRIORITY, id="priority"), pytest.param(TURNS, id="turns")])


@pytest.mark.parametrize(("name", "page"), [("priority", PRIORITY), ("turns", TURNS)])
def test_the_page_is_the_one_of_the_header(tmp_path, name, page):
    source = tmp_path / "print.c"
    source.write_text(C_PROGRAM % {"name": name, "upper": name.upper()})
    program = tmp_path / "print"
    subprocess.run([os.environ.get("CC", "cc"), "-std=gnu11", f"-I{ROOT}/cuda_shim", "-o", program, source], check=True)
    magic, lines, line_bytes, page_bytes, first_line = map(int, subprocess.check_output([program]).split())
    assert magic == page.magic
    assert lines == LINES
    assert line_bytes == first_line == page.line_bytes
    assert page_bytes == page.size_bytes == len(page.empty())


@both
def test_new_page_has_empty_lines(page):
    assert page.accepts(len(page.empty()), page.empty()[:MAGIC_BYTES])
    assert not any(page.empty()[8:])


@both
def test_anything_else_is_not_a_page(page):
    for content in (b"", b"\0" * page.size_bytes, page.empty() + b"\0"):
        assert not page.accepts(len(content), content[:MAGIC_BYTES])


def test_pages_are_not_interchangeable():
    assert not PRIORITY.accepts(PRIORITY.size_bytes, TURNS.empty()[:MAGIC_BYTES])


def test_each_device_has_own_line_up_to_line_limit():
    assert [line_of(minor) for minor in range(LINES)] == list(range(1, LINES + 1))
    assert line_of(LINES) == 0
