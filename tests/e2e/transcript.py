# SPDX-License-Identifier: Apache-2.0
"""Transcripts in documents: the commands of a page's ``console`` blocks with what they printed, run again and compared.

A block looks as a terminal does. A line that begins with ``$`` is a command, with the lines of a here-document after it; the lines up to
the next command are its output. In an output ``…`` means anything within a line, and alone on a line any lines; columns may be wider or
narrower. A command ends with status 0 unless the next one is ``echo $?``; one that ends with ``&`` continues while the others run.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ANYTHING = "…"
COMMAND_SECONDS = 240
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_HERE_DOCUMENT = re.compile(r"<<-?\s*'?(\w+)'?")


@dataclass(frozen=True, slots=True)
class Step:
    """One command, and what the page says it prints."""

    command: str
    output: tuple[str, ...]

    @property
    def asks_for_status(self) -> bool:
        """Whether it shows how the command before it ended."""
        return self.command == "echo $?"


def steps_of(page: str) -> list[Step]:
    """Return the commands of a page, in order. Raises ValueError for a block that begins with no command or a here-document without end."""
    return [step for block in _BLOCK.findall(page) for step in _steps_of_block(block.splitlines())]


def _steps_of_block(lines: Sequence[str]) -> Iterator[Step]:
    rest = list(lines)
    if not rest or not rest[0].startswith("$ "):
        raise ValueError(f"a console block begins with {rest[:1]}: want a line with a command, $ ...")
    while rest:
        command = [rest.pop(0).removeprefix("$ ")]
        if here := _HERE_DOCUMENT.search(command[0]):
            while here[1] != command[-1]:
                if not rest:
                    raise ValueError(f"{command[0]}: the here-document has no {here[1]}")
                command.append(rest.pop(0))
        output = []
        while rest and not rest[0].startswith("$ "):
            output.append(rest.pop(0))
        yield Step("\n".join(command), tuple(output))


def difference(expected: Sequence[str], printed: str) -> str:
    """Say from where on an output is not as expected; nothing when it is."""
    lines = [line for line in printed.splitlines() if line.strip()]
    text = "".join(f"{line}\n" for line in lines)
    patterns = [_pattern(line) for line in expected if line.strip()]
    if re.fullmatch("".join(patterns), text):
        return ""
    held = max(count for count in range(len(patterns) + 1) if re.match("".join(patterns[:count]), text))
    wanted = [line for line in expected if line.strip()]
    where = f"nothing matches {wanted[held]!r}" if held < len(wanted) else "there is more than expected"
    return f"{where}; printed was:\n{text}"


def _pattern(line: str) -> str:
    if line.strip() == ANYTHING:
        return r"(?:.*\n)*?"
    words = [re.escape(word).replace(re.escape(ANYTHING), ".*?") for word in line.split()]
    return r"[ \t]*" + r"[ \t]+".join(words) + r"[ \t]*\n"


class Terminal:
    """Runs the steps of a page in a directory; ends on leaving the block what was left running."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._environment = dict(environment)
        self._beside: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._beside:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(10)

    def play(self, steps: Sequence[Step]) -> None:
        """Run the steps in order.

        Raises: AssertionError: one ended or printed other than the page says.
        """
        status = 0
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            if step.command.endswith("&"):
                self._start(step)
                continue
            status, printed = self._run(step, status)
            wrong = difference(step.output, printed)
            assert not wrong, f"$ {step.command}\n{wrong}"
            assert status == 0 or (following is not None and following.asks_for_status), f"$ {step.command}\nended with {status}"

    def _start(self, step: Step) -> None:
        assert not step.output, f"$ {step.command}\nprints at any time: its output cannot be compared"
        command = step.command.removesuffix("&")
        self._beside.append(subprocess.Popen(["bash", "-c", command], cwd=self._directory, env=self._environment, start_new_session=True))

    def _run(self, step: Step, status: int) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", f"(exit {status})\n{step.command}"],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        return done.returncode, done.stdout
