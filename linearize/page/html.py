"""The frame of a page: one HTML file without scripts, that loads nothing and follows the reader's light or dark."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..errors import redact
from ..terminal.output import printable
from .drawing import COLOURS

# The page asks the browser to load nothing at all.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# By which a page of linearize is known.
BEGINS = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
)
# LIGHT and DARK stand for the colours of drawings.
STYLE = Path(__file__).with_name("style.css").read_text("utf-8")


WORD = 12  # letters of a word that a column is always wide enough for

# Figures on top of a page, (value, what it is), in groups by where they are from.
Tiles = Mapping[str, Sequence[tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page; `body` is HTML."""

    name: str
    title: str
    body: str


def page(title: str, about: str, tiles: Tiles, sections: Sequence[Section], foot: str) -> str:
    """The whole file. Secrets are taken out, and characters that a terminal would obey are written out."""
    style = STYLE
    for place, theme in enumerate(("LIGHT", "DARK")):
        style = style.replace(theme, " ".join(f"--{name}: {pair[place]};" for name, pair in COLOURS.items()))
    boxes = "".join(_tiles(caption, group) for caption, group in tiles.items())
    links = "".join(f'<a href="#{one.name}">{text(one.title)}</a>' for one in sections)
    parts = "".join(f'<section id="{one.name}"><h2>{text(one.title)}</h2>{one.body}</section>\n' for one in sections)
    return redact(
        f"{BEGINS}<title>{text(title)}</title><style>{style}</style></head>\n"
        f'<body><header><h1>{text(title)}</h1><p class="soft">{text(about)}</p>{boxes}'
        f"<nav>{links}</nav></header>\n<main>{parts}</main>\n<footer>{text(foot)}</footer></body></html>\n"
    )


def _tiles(caption: str, tiles: Sequence[tuple[str, str]]) -> str:
    """A group of tiles under what they have in common."""
    boxes = "".join(f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for value, name in tiles)
    return (f'<p class="soft caption">{text(caption)}</p>' if caption else "") + f'<div class="tiles">{boxes}</div>'


def text(value: object) -> str:
    """Any text as HTML."""
    return html.escape(printable(str(value)))


def paragraph(words: str) -> str:
    return f"<p>{text(words)}</p>"


def missing(words: str, command: str) -> str:
    """What is not there, and the command that measures it."""
    return f'<p class="soft">{text(words)}</p><pre>{text(command)}</pre>'


def table(columns: dict[str, str], rows: Iterable[Sequence[object]]) -> str:
    """`columns`: heading -> `text` or `number`. A short word such as 4-7 stays on one line."""
    kinds = list(columns.values())

    def cell(value: object, kind: str) -> str:
        whole = " whole" * (len(str(value)) <= WORD and " " not in str(value))
        return f'<td class="{kind}{whole}">{text(value)}</td>'

    head = "".join(f'<th class="{kind}">{text(name)}</th>' for name, kind in columns.items())
    body = "".join(
        "<tr>" + "".join(cell(value, kind) for value, kind in zip(row, kinds, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(title: str, body: str) -> str:
    """Something that opens on a click."""
    return f"<details><summary>{text(title)}</summary>{body}</details>"
