"""Which heads of linear layers keep softmax: `--keep-heads "3:0,1;7:2"`, by layer and key head."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import IncompatibleError, LinearizeError
from ..terminal.output import layers_named
from .keep import UNSCORED, Choice, auto_count

if TYPE_CHECKING:  # tables of commands that need no torch name heads
    from linearize_kernels.mixer import AttentionSite

    from ..probe.found import Found

FORM = '"3:0,1;7:2" for the key heads 0 and 1 of layer 3 and 2 of layer 7, or auto:2% or auto:4'

# A layer, and the number of one of its key heads with the query heads that share it.
Group = tuple[int, int]


def written(groups: Iterable[Group]) -> str:
    """Groups as `--keep-heads` has them."""
    by_layer: dict[int, list[str]] = {}
    for layer, head in sorted(groups):
        by_layer.setdefault(layer, []).append(str(head))
    return ";".join(f"{layer}:{','.join(heads)}" for layer, heads in by_layer.items())


def parse_groups(text: str) -> list[Group]:
    """The groups of `3:0,1;7:2`, sorted. Raises LinearizeError (exit 2) for another form, or a group named twice."""
    groups: list[Group] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        found = re.fullmatch(r"(\d{1,9})\s*:\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)", part)
        if not found:
            raise LinearizeError(f"--keep-heads {text}: {part!r} is no layer and key heads. Write {FORM}")
        groups += [(int(found[1]), int(head)) for head in found[2].split(",")]
    twice = {group for group in groups if groups.count(group) > 1}
    if twice:
        raise LinearizeError(f"--keep-heads {text}: {written(twice)} is named twice")
    return sorted(groups)


def keep_heads(text: str, sites: Sequence[AttentionSite], found: Found, model: str) -> list[AttentionSite]:
    """`sites`, those that become linear in `model`, each with its heads that keep softmax.

    Raises LinearizeError: 2 for a layer that does not become linear, a head that is not there and all heads of a
    layer, 3 where heads cannot compute what the source's softmax does.
    """
    groups = parse_groups(text)
    if text and not groups:
        raise LinearizeError(f"--keep-heads {text!r} names no head. Write {FORM}")
    by_layer = {site.layer: site for site in sites}
    for layer in sorted({layer for layer, _ in groups}):
        heads = [head for own, head in groups if own == layer]
        if layer not in by_layer:
            raise LinearizeError(
                f"--keep-heads {text}: layer {layer} does not become linear. Name heads of {layers_named(by_layer)}"
            )
        site = by_layer[layer]
        if max(heads) >= site.kv_heads:
            raise LinearizeError(
                f"--keep-heads {text}: layer {layer} of {model} has {site.kv_heads} key heads (0 to "
                f"{site.kv_heads - 1}), and {max(heads)} is none of them"
            )
        if len(heads) == site.kv_heads:
            raise LinearizeError(
                f"--keep-heads {text}: these are all {site.kv_heads} key heads of layer {layer}, which leaves none to "
                f"convert. Keep the layer: --keep-softmax {layer}"
            )
        reason = obstacle(site, found)
        if reason:
            raise IncompatibleError(f"--keep-heads {text}: heads of layer {layer} {reason}")
        by_layer[layer] = dataclasses.replace(site, softmax_groups=tuple(heads))
    return [by_layer[site.layer] for site in sites]


def obstacle(site: AttentionSite, found: Found) -> str:
    """Why heads of a site cannot keep softmax beside its mechanism, behind their name; empty where they can.

    Heads that are kept know the sliding window, soft cap and sinks that transformers hands to attention functions.
    """
    from linearize_kernels.layers.softmax_heads import FOLLOWED

    if not site.causal:
        return "are bidirectional, and heads keep softmax in causal attention alone"
    others = [name for name in site.extras if name not in FOLLOWED or not site.routed]
    if others:
        return f"cannot keep softmax: the source's is given {', '.join(others)}, which heads do not follow"
    if site.path in found.cached_tokens and "sliding_window" not in site.extras:
        return "cannot keep softmax: the source hides distant tokens by its mask, which heads are not given"
    return ""


def heads_available(sites: Iterable[AttentionSite], found: Found) -> list[Group]:
    """The groups that `--keep-heads auto` chooses among: those of layers in which heads can keep softmax.

    A layer with one key head has none: all of its heads, or none, keep softmax.
    """
    fit = [site for site in sites if site.kv_heads > 1 and not obstacle(site, found)]
    return [(site.layer, head) for site in fit for head in range(site.kv_heads)]


def leaves_one(groups: Iterable[Group]) -> Callable[[Collection[Group], Group], bool]:
    """Whether one more of these groups may be kept beside others: one in each layer is left to its mechanism."""
    sizes = Counter(layer for layer, _ in groups)

    def fits(kept: Collection[Group], group: Group) -> bool:
        return sum(layer == group[0] for layer, _ in kept) + 1 < sizes[group[0]]

    return fits


def auto_heads(text: str, groups: Sequence[Group]) -> int:
    """How many of the `groups` that there are `--keep-heads auto:N` or `auto:P%` keeps.

    Raises LinearizeError: 2 for another form and for more than leave one in each layer, 3 where there are none.
    """
    if not groups:
        raise IncompatibleError(
            f"--keep-heads {text}: no layer that becomes linear has several key heads whose softmax can be kept"
        )
    count = auto_count(text, len(groups), "--keep-heads", "head")
    most = len(groups) - len({layer for layer, _ in groups})
    if count > most:
        message = f"--keep-heads {text} keeps {count} heads, and {most} leave one in each layer"
        raise LinearizeError(f"{message}. Ask for fewer")
    return count


def unscored_heads(text: str, groups: Sequence[Group]) -> Choice:
    """As many heads as asked for, evenly spread: a stand-in where no weights may be read."""
    fits, count = leaves_one(groups), auto_heads(text, groups)
    kept: list[Group] = []
    spread = [groups[(2 * n + 1) * len(groups) // (2 * count)] for n in range(count)]
    for group in (*spread, *groups):
        if len(kept) < count and group not in kept and fits(kept, group):
            kept.append(group)
    return Choice(text, UNSCORED, tuple(map(named, sorted(kept))))


def named(group: Group) -> str:
    """A group as scores have it: `3:0`."""
    return f"{group[0]}:{group[1]}"


def regrouped(names: Iterable[int | str]) -> str:
    """`--keep-heads` for heads as scores have them: `3:0,1;7:2`."""
    return written(parse_groups(";".join(map(str, names))))
