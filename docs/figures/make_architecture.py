# SPDX-License-Identifier: Apache-2.0
"""Draw docs/figures/architecture.svg: the components, and the interfaces between them.

Run it again after an edit: ``python docs/figures/make_architecture.py``. Coordinates are pixels, origin top left.
"""

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1080, 560
INK, MUTED, PAPER = "#1b2733", "#5b6b7a", "#ffffff"
OURS, THEIRS, ZONE = "#d7f0e3", "#eef1f5", "#f8fafc"
FONT = "font-family='Helvetica,Arial,sans-serif'"


@dataclass(frozen=True)
class Box:
    """A component: title, up to three lines of text, and whether it is ours."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    ours: bool = False

    def svg(self) -> str:
        """Return the box with its text, top-left aligned."""
        fill, stroke = (OURS, "#2f8f63") if self.ours else (THEIRS, "#9aa8b5")
        parts = [
            f"<rect x='{self.x}' y='{self.y}' width='{self.width}' height='{self.height}' rx='8' fill='{fill}' stroke='{stroke}'/>",
            f"<text x='{self.x + 14}' y='{self.y + 24}' {FONT} font-size='15' font-weight='bold' fill='{INK}'>{escape(self.title)}</text>",
        ]
        parts += [
            f"<text x='{self.x + 14}' y='{self.y + 45 + 18 * row}' {FONT} font-size='12.5' fill='{MUTED}'>{escape(line)}</text>"
            for row, line in enumerate(self.lines)
        ]
        return "".join(parts)


def zone(x: int, y: int, width: int, height: int, title: str) -> str:
    """Return a dashed frame: the cluster, a node, a container."""
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='12' fill='{ZONE}' stroke='#c3ccd5' stroke-dasharray='5 4'/>"
        f"<text x='{x + 14}' y='{y + 22}' {FONT} font-size='13' fill='{MUTED}'>{escape(title)}</text>"
    )


def arrow(x1: int, y1: int, x2: int, y2: int, label: str = "", at: tuple[int, int] | None = None) -> str:
    """Return an arrow with an optional label, placed at ``at`` or above the middle."""
    lx, ly = at or ((x1 + x2) // 2, (y1 + y2) // 2 - 7)
    line = f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{INK}' stroke-width='1.4' marker-end='url(#tip)'/>"
    text = f"<text x='{lx}' y='{ly}' {FONT} font-size='12' fill='{INK}' text-anchor='middle'>{escape(label)}</text>"
    return line + (text if label else "")


DRAWING = [
    zone(20, 20, 1040, 150, "cluster"),
    Box(40, 60, 220, 88, "pod", ("nvidia.com/vgpu: 2", "nvidia.com/vgpu-memory: 20480")).svg(),
    Box(360, 60, 180, 88, "kube-scheduler", ("stock program,", "own scheduler name")).svg(),
    Box(630, 60, 200, 88, "extender, webhook", ("filter, prioritize, bind,", "preempt; dashboard"), ours=True).svg(),
    Box(850, 60, 194, 88, "aliquot command", ("top, why, what-if, drift,", "doctor, simulate, demo"), ours=True).svg(),
    arrow(260, 104, 360, 104, "pending"),
    arrow(540, 104, 630, 104, "HTTP"),
    zone(20, 200, 1040, 340, "node"),
    Box(40, 250, 180, 110, "kubelet", ("device manager,", "PodResources")).svg(),
    Box(
        380, 250, 240, 110, "agent", ("inventory, ledger, grants,", "health, metrics; local placement", "where no extender runs"), ours=True
    ).svg(),
    Box(40, 420, 180, 90, "container runtime", ("resolves the CDI device", "at CreateContainer")).svg(),
    Box(800, 250, 240, 60, "NVIDIA driver", ("or the simulated one",)).svg(),
    zone(330, 392, 710, 136, "container"),
    Box(350, 424, 150, 86, "program", ("CUDA, PyTorch, …",)).svg(),
    Box(600, 424, 240, 86, "shim", ("is libcuda.so.1 here: charges,", "refuses, throttles, shows the share"), ours=True).svg(),
    Box(890, 424, 136, 86, "driver files", ("moved aside,", "same version")).svg(),
    arrow(450, 148, 170, 250, "Binding with the chosen devices", at=(480, 192)),
    arrow(220, 280, 380, 280, "Allocate: a CDI name"),
    arrow(220, 330, 380, 330, "PreStart: which container?"),
    arrow(620, 280, 800, 280, "NVML"),
    arrow(130, 360, 130, 420, "create", at=(158, 395)),
    arrow(220, 465, 330, 465, "CDI spec", at=(274, 457)),
    arrow(500, 360, 660, 424, "limits (read-only), usage region", at=(700, 384)),
    arrow(500, 467, 600, 467, "CUDA calls"),
    arrow(840, 467, 890, 467, ""),
]


def drawing() -> str:
    """Return the figure."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'>"
        f"<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0,0 L8,4 L0,8 z' fill='{INK}'/></marker></defs>"
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='{PAPER}'/>{''.join(DRAWING)}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("architecture.svg").write_text(drawing(), encoding="utf-8")
