"""Plots as inline SVG: colours come from the page's CSS, so they follow light and dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 78, 28, 12, 42
DASHES = ("", "6 4", "2 3", "9 3 2 3")
COLOURS = 6
"""The page's CSS defines --c0 to --c5."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One line of a chart; colour and dash are indices. step: constant until the next point."""

    label: str
    points: Points
    colour: int = 0
    dash: int = 0
    step: bool = False


@dataclass(frozen=True)
class Axis:
    """One axis: ends of the data range, ticks and scale."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return (value - low) / (high - low)


def number(value: float) -> str:
    """A number as it is shown everywhere: three significant digits, thousands grouped."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if abs(value) < 100 else 0
    return f"{value:,.{min(digits, 4)}f}"


def linear(values: Sequence[float], least_step: float = 0.0) -> Axis:
    """An axis from 0 past the largest value, in steps of 1, 2 or 5 times a power of ten.

    least_step: 1 for counts.
    """
    top = max([*values, 0.0]) or 1.0
    raw = max(top / 5, least_step)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    count = math.ceil(top / step - 1e-9)
    return Axis(0.0, step * count, tuple(round(step * i, 10) for i in range(count + 1)))


def logarithmic(values: Sequence[float]) -> Axis:
    """A logarithmic axis around the positive values, with ticks at 1, 2 and 5 times powers of ten.

    A range of more than three decades has ticks at the powers only.
    """
    positive = [v for v in values if v > 0] or [1.0]
    low, high = min(positive), max(positive)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    marks = (1,) if last - first > 3 else (1, 2, 5)
    grid = [m * 10.0**e for e in range(first, last + 1) for m in marks]
    start = max([t for t in grid if t <= low], default=grid[0])
    end = min([t for t in grid if t >= high and t > start], default=start * 10)
    return Axis(start, end, tuple(t for t in grid if start <= t <= end), log=True)


def chart(title: str, lines: Sequence[Line], x: Axis, y: Axis, labels: tuple[str, str]) -> str:
    """A line chart. title: what a screen reader is told. labels: of x and of y."""
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(px: float, py: float) -> tuple[float, float]:
        return LEFT + x.at(px) * inner_w, TOP + (1 - y.at(py)) * inner_h

    parts = [_frame(x, y, labels)]
    for line in lines:
        placed = [place(*point) for point in line.points]
        style = f'style="stroke:var(--c{line.colour % COLOURS})"'
        dash = f' stroke-dasharray="{DASHES[line.dash]}"' if line.dash else ""
        if len(placed) > 1:
            path = _path(placed, line.step)
            parts.append(f'<path class="l" {style}{dash} d="{path}"/>')
        if len(placed) <= 12:
            for (px, py), (vx, vy) in zip(placed, line.points, strict=True):
                tip = escape(f"{line.label}: {number(vy)} at {number(vx)}")
                parts.append(
                    f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" '
                    f'style="fill:var(--c{line.colour % COLOURS})"><title>{tip}</title></circle>'
                )
    return _svg(title, parts, HEIGHT)


def bars(title: str, rows: Sequence[tuple[str, float, int]], unit: str) -> str:
    """Horizontal bars from 0: (label, value, colour) a row."""
    top = max([value for _, value, _ in rows], default=0.0) or 1.0
    left, height = 230, 26 * len(rows) + 8
    parts = []
    for i, (label, value, colour) in enumerate(rows):
        y, width = 4 + 26 * i, max(1.0, (WIDTH - left - 110) * value / top)
        shown = escape(f"{number(value)} {unit}".strip())
        parts.append(
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="{left}" y="{y + 2}" width="{width:.1f}" height="18" rx="2" '
            f'style="fill:var(--c{colour % COLOURS})"/>'
            f'<text x="{left + width + 6:.1f}" y="{y + 15}">{shown}</text>'
        )
    return _svg(title, parts, height)


def legend(lines: Sequence[Line]) -> str:
    """The lines' names beside samples of them."""
    items = []
    for line in lines:
        dash = f' stroke-dasharray="{DASHES[line.dash]}"' if line.dash else ""
        items.append(
            '<span><svg width="26" height="10" aria-hidden="true"><path class="l" '
            f'style="stroke:var(--c{line.colour % COLOURS})"{dash} d="M1 5H25"/></svg> '
            f"{escape(line.label)}</span>"
        )
    return f'<p class="legend">{"".join(items)}</p>'


def _path(points: Points, step: bool) -> str:
    moves = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for px, py in points[1:]:
        moves.append(f"H{px:.1f}V{py:.1f}" if step else f"L{px:.1f} {py:.1f}")
    return "".join(moves)


def _frame(x: Axis, y: Axis, labels: tuple[str, str]) -> str:
    """Grid, tick labels and axis labels."""
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    parts = []
    for tick in y.ticks:
        at = TOP + (1 - y.at(tick)) * inner_h
        parts.append(
            f'<path class="g" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
            f'<text x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{tick:,.6g}</text>'
        )
    for tick in x.ticks:
        at = LEFT + x.at(tick) * inner_w
        parts.append(
            f'<path class="g" d="M{at:.1f} {TOP}V{TOP + inner_h}"/>'
            f'<text x="{at:.1f}" y="{TOP + inner_h + 16}" text-anchor="middle">'
            f"{tick:,.6g}</text>"
        )
    middle = TOP + inner_h / 2
    parts.append(
        f'<text x="{LEFT + inner_w / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(labels[0])}</text>"
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(labels[1])}</text>"
    )
    return "".join(parts)


def _svg(title: str, parts: Sequence[str], height: int) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
