"""Plans as a table, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape

from zeroweave.plan.plan import Plans, Row
from zeroweave.report.tables import tables

_GIB: Final = 2**30
_MIB: Final = 2**20
_HEAD: Final = (
    "schedule",
    "ranks",
    "parameters",
    "optimizer",
    "gradients",
    "activations",
    "flats",
    "peak",
    "host",
    "step s",
    "exposed s",
)
_COLOURS: Final = {"parameters": "#4477aa", "optimizer": "#66ccee", "at the peak beside them": "#ccbb44"}
_WIDTH, _BAR, _LEFT = 620, 22, 210


def lines(plans: Plans) -> Iterator[str]:
    """A table, with its unit of memory, and what to take. Host memory is a column where something lies there."""
    unit, name = (_GIB, "GiB") if max(row.peak for row in plans.rows) >= _GIB else (_MIB, "MiB")
    cells = [_HEAD, *(_cells(row, unit) for row in plans.rows)]
    if not any(row.host for row in plans.rows):
        at = _HEAD.index("host")
        cells = [(*row[:at], *row[at + 1 :]) for row in cells]
    yield f"memory of each rank in {name}"
    yield from tables(cells[0], cells[1:], keep=2)
    yield ""
    for advice in plans.advice:
        what = f"take {advice.take.name}" if advice.take is not None else "nothing fits"
        yield f"{advice.world} ranks: {what}: {advice.reason}"
    for module, reason in plans.eager.items():
        yield f"{module or 'the model'} runs eagerly: {reason}"


def _cells(row: Row, unit: int) -> tuple[str, ...]:
    sizes = (row.parameters, row.optimizer, row.gradients, row.activations, row.flats)
    peak = f"{row.peak / unit:.2f}{'' if row.fits else ' !'}"
    host, times = f"{row.host / unit:.2f}", (f"{row.seconds:.4f}", f"{row.exposed:.4f}")
    return row.name, str(row.world), *(f"{s / unit:.2f}" for s in sizes), peak, host, *times


def picture(plans: Plans) -> str:
    """An SVG: for each row a bar of its memory, with a line at the room that there is."""
    most = max([plans.room, *(row.peak for row in plans.rows)])
    scale = _WIDTH / most
    height = _BAR * (len(plans.rows) + 3)
    limit = _LEFT + plans.room * scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 110}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<line x1="{limit:.1f}" y1="{_BAR}" x2="{limit:.1f}" y2="{height - 2 * _BAR}" stroke="#cc3311"/>',
        f'<text x="{limit:.1f}" y="{_BAR - 6}" text-anchor="end">room: {plans.room / _GIB:.1f} GiB</text>',
    ]
    for index, row in enumerate(plans.rows):
        top = _BAR * (index + 1)
        parts.append(f'<text x="4" y="{top + 15}">{row.world} ranks, {escape(row.name)}</text>')
        x = float(_LEFT)
        for colour, nbytes in zip(_COLOURS.values(), _stacked(row), strict=True):
            parts.append(
                f'<rect x="{x:.1f}" y="{top + 3}" width="{nbytes * scale:.1f}" height="{_BAR - 6}" fill="{colour}"/>'
            )
            x += nbytes * scale
        parts.append(f'<text x="{x + 4:.1f}" y="{top + 15}">{row.peak / _GIB:.1f} GiB, {row.seconds:.3f} s</text>')
    x = float(_LEFT)
    for name, colour in _COLOURS.items():
        parts.append(f'<rect x="{x}" y="{height - _BAR}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{height - _BAR + 11}">{name}</text>')
        x += 150
    return "\n".join([*parts, "</svg>"]) + "\n"


def _stacked(row: Row) -> tuple[int, int, int]:
    return row.parameters, row.optimizer, max(0, row.peak - row.parameters - row.optimizer)
