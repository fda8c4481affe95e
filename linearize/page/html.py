"""The frame of a page: one HTML file without scripts, that loads nothing and follows the reader's light or dark."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence

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
STYLE = """
:root { color-scheme: light dark; %(light)s }
@media (prefers-color-scheme: dark) { :root { %(dark)s } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main, header, footer { max-width: 808px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 36px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 6px; }
section { border-top: 1px solid var(--grid); margin-top: 28px; padding-top: 22px; }
p { margin: 6px 0; max-width: 72ch; }
.soft, footer, figcaption { color: var(--soft); }
nav { margin-top: 14px; font-size: 14px; }
nav a { color: var(--blue); margin-right: 14px; text-decoration: none; display: inline-block; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; margin-top: 20px; }
.caption { font-size: 13px; margin: 20px 0 -12px; }
.tile { border: 1px solid var(--grid); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
figure { margin: 14px 0 0; overflow-x: auto; }
svg { display: block; max-width: 100%%; height: auto; font-family: inherit; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; margin: 12px 0 0; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: 4px 18px 4px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
.number { text-align: right; }
.whole { white-space: nowrap; }
pre { background: color-mix(in srgb, var(--grid) 45%%, var(--paper)); border-radius: 8px; padding: 12px 14px;
  overflow-x: auto; font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 8px 0 0; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 0 16px; margin-top: 18px; }
.samples h3 { font-size: 13px; color: var(--soft); margin: 12px 0 0; font-weight: 600; }
footer { font-size: 13px; padding-top: 28px; padding-bottom: 40px; }
"""


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
    style = STYLE % {
        theme: " ".join(f"--{name}: {pair[place]};" for name, pair in COLOURS.items())
        for place, theme in enumerate(("light", "dark"))
    }
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
