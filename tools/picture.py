"""Draws a step as an SVG, from a trace of `zeroweave schedule --trace`: `python tools/picture.py trace.json out.svg`.

One lane each for gathers, computation and reductions, over the time of the predicted step, whose instructions take the
medians of the recorded steps. docs/schedule.svg was made so, of examples/train.py.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any, Final

LANES: Final = {2: "gathers", 1: "computation", 3: "reductions"}
COLOURS: Final = {
    "gather": "#3b82c4",
    "forward": "#4a9d6e",
    "backward": "#c98a2b",
    "reduce": "#a65bb0",
    "update": "#999",
    "other": "#bbb",
}
WIDTH, LEFT, ROW, BAR = 880, 100, 34, 22


def bar(event: dict[str, Any], scale: float) -> str:
    """A rectangle with its instruction as a tooltip, and the name of the block where there is room for it."""
    lane = list(LANES).index(1 if event["cat"] == "update" else event["tid"])
    x, width, y = LEFT + event["ts"] * scale, max(event["dur"] * scale, 1.5), 8 + lane * ROW
    block = event["name"].split()[1]
    drawn = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{COLOURS[event["cat"]]}">'
        f"<title>{escape(event['name'])}, {event['dur'] / 1000:.1f} ms</title></rect>"
    )
    if event["cat"] != "other" and width > 7 * len(block):
        drawn += f'<text x="{x + width / 2:.1f}" y="{y + 15}" fill="#fff" text-anchor="middle">{escape(block)}</text>'
    return drawn


def draw(trace: dict[str, Any]) -> str:
    """The SVG."""
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 2 and e["cat"] in COLOURS]
    end = max(event["ts"] + event["dur"] for event in events)
    scale = (WIDTH - LEFT - 4) / end
    names = [f'<text x="0" y="{23 + ROW * i}" fill="#888">{name}</text>' for i, name in enumerate(LANES.values())]
    bottom = 8 + ROW * len(LANES)
    legend = []
    for number, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + 110 * number
        legend.append(f'<rect x="{x}" y="{bottom + 8}" width="12" height="12" rx="2" fill="{colour}"/>')
        legend.append(f'<text x="{x + 18}" y="{bottom + 18}" fill="#888">{name}</text>')
    legend.append(f'<text x="{WIDTH - 4}" y="{bottom + 18}" fill="#888" text-anchor="end">{end / 1000:.0f} ms</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 28}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="One training step: gathers, computation and reductions over time">'
    )
    return "\n".join([head, *names, *(bar(event, scale) for event in events), *legend, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())))
