"""A picture as a list of shapes, written as SVG for a page or as PNG for a model card.

Colours have names. In SVG they are variables of the page's style, so one picture serves a light and a dark page; a PNG
has the light ones. PNG needs Pillow.
"""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

from ..errors import ResourceError

Point = tuple[float, float]

# name: (light, dark)
COLOURS = {
    "paper": ("#ffffff", "#15181e"),
    "ink": ("#1b1f27", "#e7e9ee"),
    "soft": ("#626b7a", "#9aa4b4"),
    "grid": ("#e3e6eb", "#2b313c"),
    "blue": ("#2160d8", "#74a5ff"),
    "orange": ("#c96a04", "#f0a64d"),
    "green": ("#0b8457", "#46c493"),
    "purple": ("#9435c9", "#cf8ff2"),
    "red": ("#cc2f3f", "#f57f89"),
    "cyan": ("#0a7d95", "#4cc3da"),
}
SERIES = ("blue", "orange", "green", "purple", "red", "cyan")
# Pixels of a PNG for each unit of a picture, and how much finer its lines are drawn before they are made smooth.
SCALE, FINER = 2, 2
MARGIN = 12.0  # of a PNG
DASH = 4.0


@dataclasses.dataclass(frozen=True)
class Line:
    """A line through `points`; `hint` is shown where a pointer rests on it."""

    points: tuple[Point, ...]
    colour: str
    width: float = 1.5
    dashed: bool = False
    opacity: float = 1.0
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class Dot:
    """A disc."""

    x: float
    y: float
    radius: float
    colour: str
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class Text:
    """One line of text on the base line `y`."""

    x: float
    y: float
    text: str
    colour: str = "soft"
    size: float = 11.0
    anchor: Literal["start", "middle", "end"] = "start"


Shape = Line | Dot | Text


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture of `width` by `height` units; `about` says in words what it shows."""

    width: float
    height: float
    about: str
    shapes: tuple[Shape, ...]

    def svg(self) -> str:
        """The picture as an `<svg>` element whose colours are the page's variables `--NAME`."""
        name = html.escape(self.about)
        body = "".join(map(_svg, self.shapes))
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}" height="{_n(self.height)}"'
        return f'<svg {size} role="img" aria-label="{name}">{body}</svg>'

    def png(self) -> bytes:
        """The picture in light colours, SCALE pixels a unit. Raises ImportError without Pillow."""
        from PIL import Image, ImageDraw

        factor = SCALE * FINER
        width, height = (round((side + 2 * MARGIN) * SCALE) * FINER for side in (self.width, self.height))
        image = Image.new("RGB", (width, height), COLOURS["paper"][0])
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            _png(draw, _moved(shape, MARGIN, MARGIN), factor)
        file = io.BytesIO()
        image.reduce(FINER).quantize(128).save(file, "PNG")
        return file.getvalue()


def pillow(what: str) -> Any:
    """Pillow's module for images, which `what` needs. Raises LinearizeError (exit 4) where it is missing."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ResourceError(f'{what} needs pillow: pip install "linearize[vision]"') from error
    return Image


def stacked(drawings: Sequence[Drawing], gap: float = 16.0) -> Drawing:
    """Several pictures, one below the other."""
    shapes: list[Shape] = []
    top = 0.0
    for drawing in drawings:
        shapes += [_moved(shape, 0, top) for shape in drawing.shapes]
        top += drawing.height + gap
    width = max(drawing.width for drawing in drawings)
    return Drawing(width, top - gap, ". ".join(drawing.about for drawing in drawings), tuple(shapes))


def _moved(shape: Any, right: float, down: float) -> Any:
    if isinstance(shape, Line):
        return dataclasses.replace(shape, points=tuple((x + right, y + down) for x, y in shape.points))
    return dataclasses.replace(shape, x=shape.x + right, y=shape.y + down)


# ---------------------------------------------------------------- SVG


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _svg(shape: Shape) -> str:
    colour = f"var(--{shape.colour})"
    if isinstance(shape, Text):
        place = f'x="{_n(shape.x)}" y="{_n(shape.y)}" font-size="{_n(shape.size)}" text-anchor="{shape.anchor}"'
        return f'<text {place} fill="{colour}">{html.escape(shape.text)}</text>'
    hint = f"<title>{html.escape(shape.hint)}</title>" if shape.hint else ""
    if isinstance(shape, Line):
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in shape.points)
        look = f'stroke="{colour}" stroke-width="{_n(shape.width)}" stroke-linejoin="round" stroke-linecap="round"'
        look += f' stroke-dasharray="{_n(DASH)} {_n(DASH)}"' if shape.dashed else ""
        look += f' stroke-opacity="{shape.opacity:g}"' if shape.opacity != 1 else ""
        return f'<polyline points="{points}" fill="none" {look}>{hint}</polyline>'
    look = f'fill="{colour}" stroke="{colour}" stroke-width="1.5"'
    return f'<circle cx="{_n(shape.x)}" cy="{_n(shape.y)}" r="{_n(shape.radius)}" {look}>{hint}</circle>'


# ---------------------------------------------------------------- PNG


def _rgb(name: str, opacity: float = 1.0) -> tuple[int, ...]:
    """A light colour over the paper."""
    own, paper = ([int(COLOURS[one][0][place : place + 2], 16) for place in (1, 3, 5)] for one in (name, "paper"))
    return tuple(round(opacity * a + (1 - opacity) * b) for a, b in zip(own, paper, strict=True))


def _png(draw: Any, shape: Shape, factor: int) -> None:
    from PIL import ImageFont

    if isinstance(shape, Text):
        font = ImageFont.load_default(shape.size * factor)
        place = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
        draw.text((shape.x * factor, shape.y * factor), shape.text, _rgb(shape.colour), font, place)
    elif isinstance(shape, Line):
        colour, width = _rgb(shape.colour, shape.opacity), max(1, round(shape.width * factor))
        for part in _dashes(shape.points) if shape.dashed else [shape.points]:
            draw.line([(x * factor, y * factor) for x, y in part], colour, width, joint="curve")
    else:
        circle, edge = (shape.x * factor, shape.y * factor), round(1.5 * factor)
        draw.circle(circle, shape.radius * factor + edge / 2, _rgb(shape.colour), _rgb(shape.colour), edge)


def _dashes(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """The strokes of a dashed line, DASH units long and apart."""
    strokes = []
    for (x, y), (to_x, to_y) in itertools.pairwise(points):
        length = math.dist((x, y), (to_x, to_y))
        for number in range(0, math.ceil(length / DASH), 2):
            ends = [min(1.0, (number + end) * DASH / length) for end in (0, 1)]
            begin, end = ((x + (to_x - x) * share, y + (to_y - y) * share) for share in ends)
            strokes.append((begin, end))
    return strokes
