"""Charts as drawings: lines over an axis."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from ..terminal.output import short, size
from .drawing import Dot, Drawing, Line, Point, Shape, Text

WIDTH = 760.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 18.0, 44.0, 40.0
MOST_POINTS = 240  # of one line: more cannot be told apart
MOST_HINTS = 60  # of one line that has dots


def number(value: float, digits: int = 3) -> str:
    """A number for people, in so many digits: 0.0031, 12.5, 20M."""
    if value == 0:
        return "0"
    return short(value, digits) if abs(value) >= 1e-3 else f"{value:.{digits - 2}e}".replace("e-0", "e-")


@dataclasses.dataclass(frozen=True)
class Axis:
    """What an axis shows: its label, whether it is logarithmic, how a value is written, ticks where they are given."""

    label: str
    log: bool = False
    text: Callable[[float], str] = number
    ticks: tuple[float, ...] | None = None

    def between(self, low: float, high: float) -> Axis:
        """This axis from `low` to `high`, with ticks; numbers get as many digits as tell the ticks apart."""
        marks = tuple(value for value in self.ticks or ticks(low, high, self.log) if low <= value <= high)
        if self.text is not number:
            return dataclasses.replace(self, ticks=marks)
        enough = (n for n in range(3, 15) if len({number(value, n) for value in marks}) == len(marks))
        return dataclasses.replace(self, ticks=marks, text=functools.partial(number, digits=next(enough, 15)))


@dataclasses.dataclass(frozen=True)
class Series:
    """A named line; `faint` is for what another line makes smooth."""

    name: str
    points: Sequence[Point]
    colour: str
    dashed: bool = False
    dots: bool = False
    faint: bool = False


def binary(value: float) -> str:
    """A number of tokens that is a power of two: 512, 4k, 1M."""
    for unit, step in (("M", 2**20), ("k", 2**10)):
        if value >= step:
            return f"{value / step:g}{unit}"
    return f"{value:g}"


def bytes_text(value: float) -> str:
    """Bytes without needless digits: 4 MiB."""
    return size(value).replace(".0 ", " ")


# ---------------------------------------------------------------- axes


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers between `low` and `high`, about five."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            found = [step * 10.0**decade for decade in decades for step in steps]
            found = [value for value in found if low * 0.999 <= value <= high * 1.001]
            if len(found) >= 3:
                return found[:: math.ceil(len(found) / 7)]
    span = high - low
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def limits(values: Sequence[float], log: bool) -> tuple[float, float]:
    """The ends of an axis that shows these values with some margin."""
    low, high = min(values), max(values)
    if log:
        margin = max((high / low) ** 0.06, 1.02)
        return low / margin, high * margin
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if 0 <= low < 0.3 * high else low - margin), high + margin


def scale(low: float, high: float, log: bool, start: float, end: float) -> Callable[[float], float]:
    """A value between `low` and `high` as a place between `start` and `end`."""
    change = math.log10 if log else lambda value: value
    a, b = change(low), change(high)
    return lambda value: start + (end - start) * (change(value) - a) / (b - a)


def finite(points: Sequence[Point], log_x: bool, log_y: bool) -> list[Point]:
    """The points that an axis can show."""
    good = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    return [(x, y) for x, y in good if (x > 0 or not log_x) and (y > 0 or not log_y)]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points: each the mean of its neighbours, the last one as it is."""
    group = math.ceil(len(points) / most)
    if group <= 1:
        return list(points)
    parts = [points[start : start + group] for start in range(0, len(points) - 1, group)]
    means = [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
    return [*means, points[-1]]


def smoothed(points: Sequence[Point], share: float = 0.04) -> list[Point]:
    """A running mean over that share of the points."""
    reach = max(min(1, len(points) // 8), round(len(points) * share / 2))
    found = []
    for place, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, place - reach) : place + reach + 1]]
        found.append((x, sum(near) / len(near)))
    return found


# ---------------------------------------------------------------- charts


def lines(title: str, series: Sequence[Series], x: Axis, y: Axis, height: float = 250.0) -> Drawing:
    """Lines over one pair of axes, their names above; empty series are left out.

    Raises ValueError when nothing can be shown.
    """
    shown = [dataclasses.replace(one, points=finite(one.points, x.log, y.log)) for one in series]
    shown = [one for one in shown if one.points]
    if not shown:
        raise ValueError(f"{title}: no values")
    xs, ys = ([point[place] for one in shown for point in one.points] for place in (0, 1))
    low_x, high_x = (min(xs), max(xs)) if max(xs) > min(xs) else limits(xs, x.log)
    low_y, high_y = limits(ys, y.log)
    x, y = x.between(low_x, high_x), y.between(low_y, high_y)
    across = scale(low_x, high_x, x.log, LEFT, WIDTH - RIGHT)
    down = scale(low_y, high_y, y.log, height - BOTTOM, TOP)
    shapes = frame(title, x, y, across, down, height)
    for one in shown:
        points = tuple((across(a), down(b)) for a, b in thinned(one.points))
        if len(points) == 1 and one.dashed:  # one value for all: a level
            points = ((LEFT, points[0][1]), (WIDTH - RIGHT, points[0][1]))
        ends = f"{one.name}: {y.text(one.points[0][1])} to {y.text(one.points[-1][1])}"
        if len(points) > 1:
            weight = 1.0 if one.faint else 1.4 if one.dashed else 2.0
            shapes.append(Line(points, one.colour, weight, one.dashed, 0.3 if one.faint else 1.0, ends))
        if one.dots:
            every = math.ceil(len(one.points) / MOST_HINTS)
            for a, b in [*one.points[:-1:every], one.points[-1]]:
                hint = f"{one.name}: {y.text(b)} at {x.text(a)} {x.label}"
                shapes.append(Dot(across(a), down(b), 2.6, one.colour, hint=hint))
    shapes += legend([(one.name, one.colour, one.dashed) for one in shown if not one.faint])
    about = ", ".join(f"{one.name} {y.text(one.points[-1][1])}" for one in shown if not one.faint)
    last = {one.points[-1][0] for one in shown if not one.faint}
    where = f"{x.text(last.pop())} {x.label}" if len(last) == 1 else "the end"  # of each line, where they differ
    return Drawing(WIDTH, height, f"{title}, at {where}: {about}", tuple(shapes))


def frame(
    title: str, x: Axis, y: Axis, across: Callable[[float], float], down: Callable[[float], float], height: float
) -> list[Shape]:
    """Title, grid, ticks and labels; both axes are `between` their ends."""
    shapes: list[Shape] = [Text(0, 14, title, "ink", 13)]
    shapes.append(Text(0, TOP - 10, y.label))
    for value in y.ticks or ():
        place = down(value)
        shapes += [Line(((LEFT, place), (WIDTH - RIGHT, place)), "grid", 1.0)]
        shapes += [Text(LEFT - 8, place + 4, y.text(value), anchor="end")]
    shapes.append(Line(((LEFT, height - BOTTOM), (WIDTH - RIGHT, height - BOTTOM)), "soft", 1.0))
    for value in x.ticks or ():
        place = across(value)
        shapes.append(Line(((place, height - BOTTOM), (place, height - BOTTOM + 4)), "soft", 1.0))
        shapes.append(Text(place, height - BOTTOM + 17, x.text(value), anchor="middle"))
    shapes.append(Text(WIDTH - RIGHT, height - 6, x.label, anchor="end"))
    return shapes


def legend(entries: Sequence[tuple[str, str, bool]]) -> list[Shape]:
    """Names at the right above a chart, each with a stroke of its colour; one name needs no legend."""
    shapes: list[Shape] = []
    right = WIDTH - RIGHT
    for name, colour, dashed in reversed(entries if len(entries) > 1 else ()):
        right -= 0.53 * 11.0 * len(name)  # about its width
        shapes += [
            Text(right, TOP - 10, name, "ink"),
            Line(((right - 24, TOP - 14), (right - 6, TOP - 14)), colour, 2.5, dashed),
        ]
        right -= 40
    return shapes
