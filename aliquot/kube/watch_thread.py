# SPDX-License-Identifier: Apache-2.0
"""A list-watch in a thread of its own, over urllib3: does what the machine of ``watch`` decides."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from aliquot.kube.errors import KubeApiError
from aliquot.kube.urllib3_transport import KubeConnection
from aliquot.kube.watch import Event, ListWatch, Read, Wait, Watch

logger = logging.getLogger(__name__)

T = TypeVar("T")


def follow(
    machine: ListWatch[T],
    connection: KubeConnection,
    deliver: Callable[[Event[T]], None],
    report: Callable[[str], None],
    stopped: threading.Event,
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """List and watch in this thread until stopped.

    Args: deliver: takes each event; an exception from it fails the try. report: takes the sentence of a failure, and "" for an open watch.
    """
    while not stopped.is_set():
        step = machine.next_step(monotonic(), random.random())  # noqa: S311 - spreads load
        if isinstance(step, Wait):
            stopped.wait(step.seconds)
            continue
        try:
            for event in _carry_out(step, machine, connection, report, monotonic):
                if stopped.is_set():
                    return
                deliver(event)
        except KubeApiError as exc:
            if machine.failed(exc):
                report(str(exc))
        except Exception as exc:  # without this thread the program would miss every change, silently
            logger.exception("watching %s", step.path)
            error = KubeApiError(f"unexpected {type(exc).__name__}: {exc}")
            machine.failed(error)
            report(str(error))


def _carry_out(
    step: Read | Watch, machine: ListWatch[T], connection: KubeConnection, report: Callable[[str], None], monotonic: Callable[[], float]
) -> Iterator[Event[T]]:
    """Send the request of a step; yield what the listener must learn."""
    if isinstance(step, Read):
        yield from machine.replied(connection.request("GET", step.path, seconds=step.timeout_seconds))
        return
    with connection.stream(step.path, step.silence_seconds) as chunks:
        machine.opened(monotonic())
        report("")
        for chunk in chunks:
            yield from machine.received(chunk)
    machine.ended()
