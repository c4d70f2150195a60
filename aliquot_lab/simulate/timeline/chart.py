# SPDX-License-Identifier: Apache-2.0
"""Charts of a report as SVG. Colours are variables of the page (``page.STYLE``), so one drawing serves light and dark."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Final

WIDTH, HEIGHT = 860, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 34
_BAR_HEIGHT, _BAR_GAP, _BAR_LEFT, _BAR_VALUE = 14, 3, 190, 90
_TICKS: Final = 4
_TIME_UNITS: Final = (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0), ("seconds", 1.0))
COLOURS: Final = 8
"""How many different colours the page has; further lines use them again, dashed."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    """Seconds from the beginning, and a value."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart."""

    name: str
    value: float
    shown: str


def legend(names: Sequence[str]) -> str:
    """Return the names with their colours."""
    items = "".join(
        f"<li><svg width='22' height='10' aria-hidden='true'>{_key(number)}</svg>{escape(name)}</li>" for number, name in enumerate(names)
    )
    return f"<ul class='legend'>{items}</ul>"


def line_chart(title: str, lines: Sequence[Line], unit: str = "") -> str:
    """Return a chart of values over time. Args: unit: written after the numbers of the vertical axis."""
    longest = max((seconds for line in lines for seconds, _ in line.points), default=0.0) or 1.0
    step = _step(max((value for line in lines for _, value in line.points), default=0.0))
    top = step * _TICKS
    parts = [_axis(step, unit), _time_axis(longest)]
    for number, line in enumerate(lines):
        path = " ".join(f"{_x(seconds / longest):.1f},{_y(value / top):.1f}" for seconds, value in line.points)
        parts.append(f"<polyline class='{_classes(number)}' points='{path}'><title>{escape(line.name)}</title></polyline>")
    return _svg(title, HEIGHT, "".join(parts))


def bar_chart(title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Return horizontal bars in groups. Bars are scaled within their group, so that short and long waits can both be read."""
    parts: list[str] = []
    y = 4.0
    for group, bars in groups:
        longest = max((bar.value for bar in bars), default=0.0) or 1.0
        room = WIDTH - _BAR_LEFT - _BAR_VALUE
        parts.append(_text(_BAR_LEFT - 10, y + 11, group, "end", "label"))
        for number, bar in enumerate(bars):
            width = max(1.5, bar.value / longest * room)
            size = f"x='{_BAR_LEFT}' y='{y:.1f}' width='{width:.1f}' height='{_BAR_HEIGHT}'"
            parts.append(f"<rect class='{_classes(number)}' {size}><title>{escape(bar.name)}: {escape(bar.shown)}</title></rect>")
            parts.append(_text(_BAR_LEFT + width + 6, y + 11, bar.shown, "start"))
            y += _BAR_HEIGHT + _BAR_GAP
        y += 4 * _BAR_GAP
    return _svg(title, ceil(y), "".join(parts))


def _axis(step: float, unit: str) -> str:
    """Return the horizontal lines with the values at their left."""
    parts = []
    for tick in range(_TICKS + 1):
        y = _y(tick / _TICKS)
        parts.append(f"<line class='grid' x1='{_LEFT}' x2='{WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(_text(_LEFT - 8, y + 4, f"{step * tick:g}{unit}", "end"))
    return "".join(parts)


def _time_axis(longest: float) -> str:
    """Return the numbers below, in the largest unit with at least two of it."""
    unit, size = next((found for found in _TIME_UNITS if longest >= 2 * found[1]), _TIME_UNITS[-1])
    step = _step(longest / size)
    parts = [
        _text(_x(tick * step * size / longest), HEIGHT - 18, f"{tick * step:g}", "middle")
        for tick in range(_TICKS + 1)
        if tick * step * size <= longest * 1.001
    ]
    return "".join((*parts, _text(WIDTH - _RIGHT, HEIGHT - 4, f"{unit} since the first arrival", "end")))


def _step(most: float) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten, so that _TICKS steps reach ``most``."""
    if most <= 0:
        return 1.0
    power = 10.0 ** floor(log10(most / _TICKS))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * _TICKS >= most * 0.999)


def _x(part: float) -> float:
    return _LEFT + part * (WIDTH - _LEFT - _RIGHT)


def _y(part: float) -> float:
    return HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM)


def _key(number: int) -> str:
    return f"<line class='{_classes(number)}' x1='0' x2='22' y1='5' y2='5'/>"


def _classes(number: int) -> str:
    return f"c{number % COLOURS}{' again' if number >= COLOURS else ''}"


def _text(x: float, y: float, words: str, anchor: str, name: str = "") -> str:
    return f"<text{f' class={name!r}' if name else ''} x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(words)}</text>"


def _svg(title: str, height: int, body: str) -> str:
    return f"<svg viewBox='0 0 {WIDTH} {height}' role='img' aria-label='{escape(title, quote=True)}'>{body}</svg>"
