"""Small plots side by side as one SVG: a line per plot, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

WIDTH: Final = 300
HEIGHT: Final = 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 40, 34
_COLUMNS: Final = 3


@dataclass(frozen=True)
class Plot:
    title: str
    note: str  # second line of the title
    xs: tuple[float, ...]
    ys: tuple[float, ...]  # all positive


def svg(title: str, plots: Sequence[Plot], y_label: str) -> str:
    """One picture; all plots have the same vertical scale, so that slopes can be compared."""
    rows = -(-len(plots) // _COLUMNS)
    width, height = WIDTH * min(_COLUMNS, max(len(plots), 1)), HEIGHT * rows + 30
    ys = [y for p in plots for y in p.ys] or [1.0]
    low, high = math.floor(math.log2(min(ys))), math.ceil(math.log2(max(ys)))
    scale = (low, max(high, low + 1))
    size = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect {size} fill="white"/>',
        f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for n, p in enumerate(plots):
        lines.append(f'<g transform="translate({n % _COLUMNS * WIDTH},{n // _COLUMNS * HEIGHT + 30})">')
        lines += [f"  {x}" for x in _drawn(p, scale, y_label)]
        lines.append("</g>")
    return "\n".join((*lines, "</svg>", ""))


def _drawn(p: Plot, scale: tuple[int, int], y_label: str) -> list[str]:
    first, last = math.log2(p.xs[0]), math.log2(p.xs[-1])
    low, high = scale
    inner, tall = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x(value: float) -> float:
        return _LEFT + (inner / 2 if last == first else inner * (math.log2(value) - first) / (last - first))

    def y(value: float) -> float:
        return _TOP + tall * (1 - (math.log2(value) - low) / (high - low))

    found = [
        f'<text x="{_LEFT}" y="14" font-size="12" font-weight="bold">{escape(p.title)}</text>',
        f'<text x="{_LEFT}" y="29" font-size="11" fill="#555">{escape(p.note)}</text>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{inner}" height="{tall}" fill="none" stroke="#999"/>',
    ]
    step = max(1, (high - low) // 6)
    for k in range(low, high + 1, step):
        at = y(2.0**k)
        found.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_LEFT + inner}" y2="{at:.1f}" stroke="#e5e5e5"/>')
        found.append(f'<text x="{_LEFT - 4}" y="{at + 3:.1f}" font-size="9" text-anchor="end">{2.0**k:g} {escape(y_label)}</text>')
    for v in p.xs:
        found.append(f'<text x="{x(v):.1f}" y="{_TOP + tall + 13}" font-size="9" text-anchor="middle">{v:g}</text>')
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(p.xs, p.ys, strict=True))
    found.append(f'<polyline points="{points}" fill="none" stroke="#1f5fa8" stroke-width="2"/>')
    found += [
        f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="#1f5fa8"><title>{a:g}: {b:.3g} {escape(y_label)}</title></circle>'
        for a, b in zip(p.xs, p.ys, strict=True)
    ]
    return found
