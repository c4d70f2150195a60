# SPDX-License-Identifier: Apache-2.0
"""The reader of transcripts: what counts as the same output, and that a wrong page is noticed."""

import os
from pathlib import Path

import pytest

from tests.e2e.transcript import Step, Terminal, difference, steps_of

PAGE = """
# A page

```console
$ echo one; echo two
one
two
$ cat <<'EOF'
first: 1
$ no command
EOF
first: 1
…
```

```yaml
not: a transcript
```
"""


def test_commands_are_read_with_their_here_documents_and_outputs():
    assert steps_of(PAGE) == [
        Step("echo one; echo two", ("one", "two")),
        Step("cat <<'EOF'\nfirst: 1\n$ no command\nEOF", ("first: 1", "…")),
    ]


@pytest.mark.parametrize("block", ["```console\nls\n```\n", "```console\n```\n", "```console\n$ cat <<EOF\nnever ends\n```\n"])
def test_a_block_that_is_no_transcript_is_an_error(block):
    with pytest.raises(ValueError, match=r"want a line with a command|has no EOF"):
        steps_of(block)


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        pytest.param(["a   b"], "a b\n", id="narrower columns"),
        pytest.param(["a … c"], "a 12 c\n", id="within a line"),
        pytest.param(["first", "…", "last"], "first\nx\ny\nlast\n", id="any lines"),
        pytest.param(["first", "…", "last"], "first\nlast\n", id="no lines"),
        pytest.param(["x"], "\nx\n\n", id="empty lines"),
        pytest.param([], "", id="silence"),
        pytest.param(["(1+1) …%"], "(1+1) 2%\n", id="no regular expression"),
    ],
)
def test_what_varies_is_the_same(expected, printed):
    assert difference(expected, printed) == ""


@pytest.mark.parametrize(
    ("expected", "printed", "said"),
    [
        pytest.param(["a", "b"], "a\nc\n", "nothing matches 'b'", id="another line"),
        pytest.param(["a"], "a\nb\n", "more than expected", id="more"),
        pytest.param(["a", "b"], "a\n", "nothing matches 'b'", id="less"),
        pytest.param(["a … c"], "a\nc\n", "nothing matches 'a … c'", id="over lines"),
        pytest.param([], "oops\n", "more than expected", id="no silence"),
    ],
)
def test_what_differs_is_named(expected, printed, said):
    assert said in difference(expected, printed)


def test_a_page_is_played(tmp_path: Path):
    with Terminal(tmp_path, os.environ) as terminal:
        terminal.play(steps_of(PAGE))
        terminal.play([Step("exit 3", ()), Step("echo $?", ("3",)), Step("pwd", (str(tmp_path),))])
        terminal.play([Step("sleep 600 &", ()), Step("echo beside", ("beside",))])


def test_a_command_that_fails_or_prints_something_else_is_noticed(tmp_path: Path):
    with Terminal(tmp_path, os.environ) as terminal:
        with pytest.raises(AssertionError, match="ended with 3"):
            terminal.play([Step("exit 3", ()), Step("true", ())])
        with pytest.raises(AssertionError, match="nothing matches 'two'"):
            terminal.play([Step("echo one", ("two",))])
