# SPDX-License-Identifier: Apache-2.0
"""The report of a simulation: one HTML file without script and without anything to load, for light and dark. It contains no date, so equal
results are equal bytes."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from aliquot_lab.simulate.timeline.chart import Bar, Line, bar_chart, legend, line_chart
from aliquot_lab.simulate.timeline.outcome import Outcome, Point
from aliquot_lab.simulate.timeline.text import POLICY_COLUMNS, WAIT_COLUMNS, duration, policy_rows, reason_rows, wait_rows

_LIGHT: Final = ("#2f6fc2", "#c2652f", "#3f8f5b", "#8a5bb8", "#a88400", "#b03a63", "#2a8f96", "#6b6f7a")
_DARK: Final = ("#7fb2f5", "#f0a274", "#7fcf9a", "#c3a0ee", "#e3c04f", "#f08bb0", "#6fd0d6", "#b4b7bf")


_LIMITS: Final = (
    "The scheduler's own code decided. The policies of HAMi and KAI are models of their formulas. Not modelled: image pulls, grace "
    "periods, disruption budgets, taints, affinities, NUMA, NVLink, node failures, autoscaling. Queues are a simple form of Kueue's "
    "admission. docs/use/simulate.md has the rules."
)


def _palette(colours: Sequence[str]) -> str:
    return " ".join(f"--c{number}: {colour};" for number, colour in enumerate(colours))


STYLE: Final = f"""
:root {{
  color-scheme: light dark; --paper: #fbfaf7; --ink: #22242a; --faint: #6b6f7a; --line: #dcd9d0; --card: #ffffff;
  {_palette(_LIGHT)}
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --paper: #17181b; --ink: #e7e5df; --faint: #9a9ca3; --line: #34363c; --card: #1f2125;
    {_palette(_DARK)}
  }}
}}
body {{
  margin: 0 auto; max-width: 920px; padding: 24px 16px 48px; background: var(--paper); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif;
}}
h1 {{ margin: 0 0 4px; font-size: 20px; }}
h2 {{ margin: 32px 0 4px; font-size: 16px; }}
p {{ margin: 0 0 8px; color: var(--faint); }}
code {{ font: 12px ui-monospace, monospace; overflow-wrap: anywhere; }}
figure {{ margin: 8px 0; padding: 12px; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }}
svg {{ display: block; width: 100%; }}
svg text {{ font-size: 11px; fill: var(--faint); }}
svg text.label {{ fill: var(--ink); }}
svg .grid {{ stroke: var(--line); stroke-width: 1; }}
polyline, .legend line {{ fill: none; stroke: var(--hue); stroke-width: 2; stroke-linejoin: round; }}
rect {{ fill: var(--hue); }}
.again {{ stroke-dasharray: 5 3; }}
rect.again {{ opacity: .6; }}
{" ".join(f".c{number} {{ --hue: var(--c{number}); }}" for number in range(len(_LIGHT)))}
.legend {{ display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 8px 0 0; padding: 0; list-style: none; font-size: 13px; }}
.legend li {{ display: flex; align-items: center; gap: 6px; }}
.legend svg {{ width: 22px; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }}
th {{ color: var(--faint); font-weight: 500; }}
th:first-child, td:first-child, td.text, th.text {{ text-align: left; }}
@media print {{ body {{ max-width: none; }} figure {{ break-inside: avoid; }} }}
"""


def page(outcomes: Sequence[Outcome], command: str) -> str:
    """Return the report. Args: command: the command line that made it."""
    first, names = outcomes[0], [outcome.policy for outcome in outcomes]
    key = legend(names)
    size = f"{first.nodes} nodes, {first.gpus} GPUs, {len(first.records)} workloads, seed {first.seed}"
    parts = [
        "<h1>Simulated cluster</h1>",
        f"<p>{size}. Averages are over the time of arrivals.</p>",
        f"<p><code>{escape(command)}</code></p>",
        "<h2>Policies</h2>",
        _table(POLICY_COLUMNS, policy_rows(outcomes), texts=1),
        "<h2>GPUs allocated</h2>",
        "<p>Percent of all GPUs over time: the mean of memory and compute.</p>",
        _figure(_lines("GPUs allocated over time", outcomes, lambda point: point.allocated_percent, " %"), key),
        "<h2>Whole nodes</h2>",
        "<p>Nodes with GPUs and no pod on any of them. A pod that needs a whole node can start there.</p>",
        _figure(_lines("Whole nodes over time", outcomes, lambda point: point.whole_nodes), key),
        "<h2>Waiting workloads</h2>",
        "<p>Those without room, and those without quota.</p>",
        _figure(_lines("Waiting workloads over time", outcomes, lambda point: point.waiting), key),
        "<h2>Waits by class</h2>",
        "<p>95th percentile of the wait until the first start, of classes that waited. Bars are scaled within each class.</p>",
        _figure(bar_chart("95th percentile of waits by class", _wait_bars(outcomes)), key),
        _table(WAIT_COLUMNS, wait_rows(outcomes), texts=2),
        "<h2>Why workloads did not start at once</h2>",
        _table(("policy", "reason", "workloads"), reason_rows(outcomes), texts=2),
        "<h2>What this does not show</h2>",
        f"<p>{_LIMITS}</p>",
    ]
    head = (
        f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>Simulated cluster</title><style>{STYLE}</style>"
    )
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _lines(title: str, outcomes: Sequence[Outcome], value: Callable[[Point], float], unit: str = "") -> str:
    lines = [
        Line(outcome.policy, [(point.seconds - outcome.begin_seconds, value(point)) for point in outcome.curve()]) for outcome in outcomes
    ]
    return line_chart(title, lines, unit)


def _wait_bars(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Bar]]]:
    """Return the bars of the classes in which a workload waited under some policy."""
    groups = []
    for waits in zip(*(outcome.waits() for outcome in outcomes), strict=True):
        if any(found.waited for found in waits):
            bars = [Bar(outcome.policy, found.p95, duration(found.p95)) for outcome, found in zip(outcomes, waits, strict=True)]
            groups.append((waits[0].size, bars))
    return groups


def _figure(drawing: str, key: str) -> str:
    return f"<figure>{drawing}{key}</figure>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> str:
    """Return a table. Args: texts: how many columns are texts, from the left; the others are numbers."""
    if not rows:
        return "<p>No workload waited.</p>"
    lines = [_row("th", header, texts), *(_row("td", row, texts) for row in rows)]
    return f"<div class='table'><table>{''.join(lines)}</table></div>"


def _row(cell: str, values: Sequence[str], texts: int) -> str:
    cells = (f"<{cell}{' class=text' if number < texts else ''}>{escape(value)}</{cell}>" for number, value in enumerate(values))
    return f"<tr>{''.join(cells)}</tr>"
