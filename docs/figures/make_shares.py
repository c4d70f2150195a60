# SPDX-License-Identifier: Apache-2.0
"""Draw docs/figures/shares.svg: one GPU, what three pods request, and what is left.

Run it again after an edit: ``python docs/figures/make_shares.py``. Coordinates are pixels, origin top left.
"""

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 900, 300
LEFT, BAR = 170, 700
INK, MUTED, PAPER, FREE = "#1b2733", "#5b6b7a", "#ffffff", "#eef1f5"
FONT = "font-family='Helvetica,Arial,sans-serif'"


@dataclass(frozen=True)
class Share:
    """The request of one pod in MiB and percent; None means no request: the pod uses what is free."""

    pod: str
    colour: str
    memory_mib: int
    cores_percent: int | None


MEMORY_MIB, REPLICAS = 81920, 16
SHARES = (Share("train", "#a9d8bf", 32768, 50), Share("serve", "#bcd3f0", 20480, 30), Share("notebook", "#f3d3ae", 16384, None))


def text(x: float, y: float, words: str, *, size: float = 12.5, colour: str = INK, anchor: str = "start") -> str:
    """Return one line of text."""
    return f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size:g}' fill='{colour}' text-anchor='{anchor}'>{escape(words)}</text>"


def row(y: int, title: str, note: str, parts: list[tuple[str, float, str]]) -> str:
    """Return a bar with its title left of it; the rest of the bar is free.

    Args: parts: words, part of the whole, and colour of each.
    """
    drawn = [text(LEFT - 14, y + 18, title, anchor="end"), text(LEFT - 14, y + 34, note, size=11, colour=MUTED, anchor="end")]
    drawn.append(f"<rect x='{LEFT}' y='{y}' width='{BAR}' height='40' rx='5' fill='{FREE}' stroke='#9aa8b5'/>")
    at = float(LEFT)
    for words, part, colour in parts:
        drawn.append(f"<rect x='{at:g}' y='{y}' width='{part * BAR:g}' height='40' fill='{colour}' stroke='{INK}' stroke-width='.6'/>")
        drawn.append(text(at + part * BAR / 2, y + 25, words, anchor="middle"))
        at += part * BAR
    left = 1 - sum(part for _, part, _ in parts)
    drawn.append(text(at + left * BAR / 2, y + 25, "free", colour=MUTED, anchor="middle"))
    return "".join(drawn)


def drawing() -> str:
    """Return the figure."""
    memory = [(f"{one.pod}: {one.memory_mib} MiB", one.memory_mib / MEMORY_MIB, one.colour) for one in SHARES]
    cores = [(f"{one.pod}: {one.cores_percent} %", one.cores_percent / 100, one.colour) for one in SHARES if one.cores_percent is not None]
    replicas = [("1", 1 / REPLICAS, one.colour) for one in SHARES]
    borrows = next(one for one in SHARES if one.cores_percent is None)
    body = "".join(
        (
            text(LEFT, 30, f"one GPU of {MEMORY_MIB} MiB", size=15),
            row(50, "vgpu-memory", "a limit, in MiB", memory),
            row(120, "vgpu-cores", "percent of SM time", cores),
            text(LEFT + BAR, 178, f"{borrows.pod} requests no cores: it uses what is free", size=11, colour=MUTED, anchor="end"),
            row(200, "vgpu", f"{REPLICAS} shares, one each", replicas),
            text(LEFT, 275, "Three separate sums. Each must stay within its bar.", colour=MUTED),
        )
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'>"
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='{PAPER}'/>{body}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("shares.svg").write_text(drawing(), encoding="utf-8")
