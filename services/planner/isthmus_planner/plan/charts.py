"""Plain SVG charts: the same bytes everywhere, nothing to load. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 62, 46
COLOURS = {"prefill": "#c2571a", "decode": "#1f6f8b", "aggregated": "#7a8b3c", "idle": "#d8d8d8"}
INK, FAINT, ACCENT = "#222", "#ddd", "#1f6f8b"
TICKS = 5


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    low: float | None = None
    """Whisker down to here."""
    dot: float | None = None
    """A second figure for the same thing."""


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    label: str = ""
    chosen: bool = False


def ticks(most: float) -> list[float]:
    """0 and up to five round steps, the last at or above `most`."""
    if most <= 0 or not math.isfinite(most):
        return [0.0, 1.0]
    raw = most / TICKS
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * (1 - 1e-9))
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


def short(value: float) -> str:
    """Three significant digits, thousands as k, millions as M."""
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def bars(title: str, unit: str, items: Sequence[Bar], dot_label: str = "") -> str:
    """Vertical, from 0; whiskers and dots where given."""
    marks = ticks(max([each.value for each in items] + [each.dot or 0.0 for each in items] + [0.0]))
    plot_width, each_width = WIDTH - LEFT - RIGHT, (WIDTH - LEFT - RIGHT) / max(1, len(items))
    parts = _frame(title, unit, marks)
    for index, each in enumerate(items):
        centre, half = LEFT + each_width * (index + 0.5), min(40.0, each_width * 0.3)
        top = _y(each.value, marks)
        parts.append(_rect(centre - half, top, 2 * half, HEIGHT - BOTTOM - top, ACCENT, 0.75))
        parts.append(_text(centre, top - 6, short(each.value)))
        if each.low is not None:
            parts.append(_line(centre, top, centre, _y(each.low, marks), INK, 1.5))
            parts.append(_line(centre - 7, _y(each.low, marks), centre + 7, _y(each.low, marks), INK, 1.5))
        if each.dot is not None:
            parts.append(_circle(centre + half * 0.55, _y(each.dot, marks), 5, "#c2571a"))
        parts.append(_text(centre, HEIGHT - BOTTOM + 18, _cut(each.label, int(each_width / 6.5))))
    if dot_label:
        parts.append(_circle(LEFT + plot_width - 80, TOP - 20, 5, "#c2571a"))
        parts.append(_text(LEFT + plot_width - 70, TOP - 16, dot_label, anchor="start"))
    return _svg(title, parts)


def scatter(title: str, x_unit: str, y_unit: str, points: Sequence[Point]) -> str:
    """Joined in order; both axes from 0."""
    x_marks, y_marks = ticks(max(point.x for point in points)), ticks(max(point.y for point in points))
    parts = _frame(title, y_unit, y_marks)
    for mark in x_marks:
        parts.append(_text(_x(mark, x_marks), HEIGHT - BOTTOM + 16, short(mark)))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_unit))
    placed = [(_x(point.x, x_marks), _y(point.y, y_marks), point) for point in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in placed)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{ACCENT}" stroke-width="1.5"/>')
    for x, y, point in placed:
        parts.append(_circle(x, y, 7 if point.chosen else 4, "#c2571a" if point.chosen else ACCENT))
        if point.label:
            parts.append(_text(x - 10, y - 10, point.label, anchor="end"))
    return _svg(title, parts)


def stacks(title: str, unit: str, items: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """One bar a label, made of (kind, value) parts whose kinds have colours."""
    marks = ticks(max((math.fsum(value for _, value in parts) for _, parts in items), default=1.0))
    each_width = (WIDTH - LEFT - RIGHT) / max(1, len(items))
    drawn = _frame(title, unit, marks)
    for index, (label, kinds) in enumerate(items):
        centre, half, below = LEFT + each_width * (index + 0.5), min(34.0, each_width * 0.32), 0.0
        for kind, value in kinds:
            if value > 0:
                top = _y(below + value, marks)
                drawn.append(_rect(centre - half, top, 2 * half, _y(below, marks) - top, COLOURS[kind], 0.9))
                drawn.append(
                    _text(
                        centre, (top + _y(below, marks)) / 2 + 4, short(value), fill=INK if kind == "idle" else "#fff"
                    )
                )
                below += value
        drawn.append(_text(centre, HEIGHT - BOTTOM + 18, _cut(label, int(each_width / 6.5))))
    for index, (kind, colour) in enumerate(COLOURS.items()):
        drawn.append(_rect(WIDTH - RIGHT - 350 + 92 * index, TOP - 26, 10, 10, colour, 0.9))
        drawn.append(_text(WIDTH - RIGHT - 336 + 92 * index, TOP - 16, kind, anchor="start"))
    return _svg(title, drawn)


def _frame(title: str, unit: str, marks: Sequence[float]) -> list[str]:
    parts = [_text(12, 20, title, anchor="start", weight="bold"), _text(12, TOP - 16, unit, anchor="start")]
    for mark in marks:
        y = _y(mark, marks)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, FAINT if mark else INK, 1.0))
        parts.append(_text(LEFT - 8, y + 4, short(mark), anchor="end"))
    return parts


def _x(value: float, marks: Sequence[float]) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / marks[-1]


def _y(value: float, marks: Sequence[float]) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / marks[-1]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"


def _text(x: float, y: float, text: str, *, anchor: str = "middle", weight: str = "normal", fill: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">'
        f"{escape(text)}</text>"
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, opacity: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(0.0, height):.1f}" fill="{fill}" '
        f'fill-opacity="{opacity:g}"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width:g}"/>'


def _circle(x: float, y: float, radius: float, fill: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"/>'


def _svg(title: str, parts: Sequence[str]) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}" font-family="system-ui, sans-serif" font-size="12">\n{inner}\n</svg>'
    )
