"""What `--keep-softmax auto:2`, `--keep-heads` and `--kept-window auto:4096` ask for, and the choices that a plan
stores."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from ..errors import IncompatibleError, LinearizeError
from ..terminal.output import layers_named, nats

if TYPE_CHECKING:
    from linearize_kernels.mixer import AttentionSite

    from ..probe.found import Found


Method = Literal["restore", "swaps"]
METHODS: tuple[Method, ...] = get_args(Method)
# What kept softmax becomes where its memory is bounded: the mechanism, and how many first tokens stay in sight
# (arXiv 2309.17453 finds that four suffice).
LOCAL, SINK = "window", 4
MOST_WINDOW = 65536
# By how much, in nats a token, a window may change the source's predictions where linearize decides which kept layers
# have one (docs/choosing.md, Kept layers of bounded memory).
WINDOW_LIMIT = 0.01
WINDOW_FORMS = "4096, 4096@1,3 (in these layers alone), auto:4096 or auto:4096:0.02 (where it costs no more)"
SCORES_SHOWN = 40  # in one message
LONGEST = 16_384  # tokens of a text on which the cost of such a window is measured
UNSCORED = "none"  # the method of a plan that was made without weights
NAMED = "named"  # of one whose layers the user named, where only what their window costs was measured
# What a layer's score says, by method.
MEANING = {
    "restore": "share of the loss that softmax in it gives back, with what was chosen before it; those chosen add up",
    "swaps": "share of the loss that making it alone linear brings",
    "gates": "how far its gate stayed open, 0 to 1",  # of plans that earlier versions made
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """Why a plan keeps softmax where it does.

    `kept` are the chosen layers of those that `scores` names, by number, or the chosen heads, as `3:0`; MEANING says
    what a score of the `method` is. `text` names what was read: `tokens` tokens to compare predictions on, in rows of
    `seq_len`, or images, and `recalls` texts that ask for a repetition. `kl` is how far the source is, as `measured`
    says, on the text and on what is asked for, with none kept (`linear`) and with those `kept`. `lacking` says why a
    model that writes text has no `recalls`. `stand_in` is what the layers that are not kept computed, where that is not
    the plan's mechanism. Layers that the user named (NAMED) have no scores.

    `window` says, where kept softmax has one, what the source loses by it in these layers alone, at the end of text and
    of texts that ask for a repetition, both of `length` tokens: perplexities without and with it (`source_ppl`, `ppl`)
    and the divergence (`kl`).
    """

    asked: str
    method: str
    kept: tuple[int, ...] | tuple[str, ...]
    scores: dict[str, float] = dataclasses.field(default_factory=dict)
    text: str = ""
    tokens: int = 0
    recalls: int = 0
    kl: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    window: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    lacking: str = ""
    seq_len: int = 0
    measured: str = "KL from the source in nats a token"
    stand_in: str = ""

    def scored(self) -> str:
        """The scores from the highest on, and what was kept, in one message."""
        kept = {*map(str, self.kept)}
        order = sorted(self.scores, key=lambda name: (-self.scores[name], name not in kept))
        shown = [f"{name}: {self.scores[name]:.3f}{' (kept)' * (name in kept)}" for name in order[:SCORES_SHOWN]]
        more = len(order) - len(shown)
        rest = f", and {more} more in linearize.json" if more else ""
        beside = f", beside {self.stand_in} in the others" if self.stand_in else ""
        return f"{self.asked}, scored by {self.method} ({MEANING[self.method]}{beside}): {', '.join(shown)}{rest}"

    @classmethod
    def unscored(cls, asked: str, layers: list[int], of: int) -> Choice:
        """As many layers as are `asked` for `of` those that become linear, evenly spread over `layers`, which have no
        heads that the user named: a stand-in where no weights may be read."""
        count = auto_count(asked, of)
        if count > len(layers):
            raise LinearizeError(
                f"--keep-softmax {asked} keeps {count} layers, and --keep-heads names heads of all but {len(layers)} "
                f"of {of}. Ask for fewer"
            )
        return cls(asked, UNSCORED, tuple(layers[(2 * n + 1) * len(layers) // (2 * count)] for n in range(count)))


@dataclasses.dataclass(frozen=True)
class KeptWindow:
    """A window of `tokens` tokens for kept softmax: in the kept `layers`, written as `0-3,7` (empty: in all), or, where
    there is a `limit`, in those of which it is measured that the window costs no more nats a token."""

    tokens: int
    layers: str = ""
    limit: float | None = None

    @classmethod
    def parse(cls, asked: int | str) -> KeptWindow:
        """The window that is written as one of WINDOW_FORMS. Raises ValueError for what is none."""
        named = re.fullmatch(r"(-?\d{1,9})(?:@([\d,\- ]+))?", str(asked).strip())
        auto = re.fullmatch(r"auto:(\d{1,9})(?::(\d{1,9}(?:\.\d{1,9})?))?", str(asked).strip())
        found = named or auto
        if found is None:
            raise ValueError(f"must be {WINDOW_FORMS}")
        if not 1 <= int(found[1]) <= MOST_WINDOW:
            raise ValueError(f"must be >= 1 and <= {MOST_WINDOW}")
        limit = float(auto[2] or WINDOW_LIMIT) if auto else None
        if limit == 0:
            raise ValueError("the limit must be > 0: a window that leaves something out changes predictions")
        return cls(int(found[1]), (named[2] if named else None) or "", limit)

    def __str__(self) -> str:
        """As `parse` reads it."""
        if self.limit is None:
            return f"{self.tokens}@{self.layers}" if self.layers else str(self.tokens)
        return f"auto:{self.tokens}" + ("" if self.limit == WINDOW_LIMIT else f":{self.limit:g}")


@dataclasses.dataclass(frozen=True)
class WindowChoice:
    """Why some kept layers see the last tokens and the first ones alone, and the others all.

    `near` are those that `asked` found a window for, since it costs at most `limit` nats a token in each and in all of
    them together. `costs` says of each layer, by number, what the source loses where that layer alone has the window,
    and `together` what it loses with all of `near`: on `text` and on texts that ask for a repetition (`recall`),
    perplexities without and with it (`source_ppl`, `ppl`) and the divergence (`kl`) over the last `tokens` of rows of
    `length`. `lacking` says why there are no costs: then no layer has a window.
    """

    asked: str
    limit: float
    near: tuple[int, ...] = ()
    costs: dict[str, dict[str, dict[str, float]]] = dataclasses.field(default_factory=dict)
    together: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    text: str = ""
    lacking: str = ""

    def measured(self) -> str:
        """The cost of every layer from the lowest on, and which have the window, in one message."""
        if not self.costs:
            return f"--kept-window {self.asked}: all kept layers see all tokens, since {self.lacking}"
        order = sorted(self.costs, key=lambda name: largest_kl(self.costs[name]))
        near = {*map(str, self.near)}
        shown = [f"{name}: {nats(largest_kl(self.costs[name]))}{' (window)' * (name in near)}" for name in order]
        return f"--kept-window {self.asked}, KL by the window in each layer, limit {self.limit:g}: {', '.join(shown)}"


def largest_kl(cost: dict[str, dict[str, float]]) -> float:
    """What a window costs: the larger of the divergences on text and on repetitions, in nats a token."""
    return max(one["kl"] for one in cost.values())


def is_auto(asked: int | str | None) -> bool:
    """Whether the layers, or heads, that keep softmax, or those with a window, are left to linearize."""
    return str(asked).strip().startswith("auto")


def auto_count(asked: str, number: int, flag: str = "--keep-softmax", what: str = "layer") -> int:
    """How many of `number` layers `auto:N` or `auto:P%` keeps: at least one, and not all. Or of heads.

    Raises LinearizeError (exit 2) for anything else.
    """
    where = f"{flag} {asked}"
    found = re.fullmatch(r"auto:(\d{1,9}(?:\.\d{1,9})?)(%?)", asked.strip())
    if not found or (not found[2] and "." in found[1]):
        raise LinearizeError(f"{where}: write auto:2 for two {what}s, or auto:25% for a quarter of them")
    count = max(1, round(number * float(found[1]) / 100)) if found[2] else int(found[1])
    if float(found[1]) == 0:
        raise LinearizeError(f"{where} keeps no {what}. Leave {flag} out")
    if count >= number:
        raise LinearizeError(f"{where} keeps {count} of {number} {what}s and leaves none to convert. Ask for fewer")
    return count


# ---------------------------------------------------------------- heads

# Which heads of linear layers keep softmax: `--keep-heads "3:0,1;7:2"`, by layer and KV head.


FORM = '"3:0,1;7:2" for the KV heads 0 and 1 of layer 3 and 2 of layer 7, or auto:2% or auto:4'

# A layer, and the number of one of its KV heads with the query heads that share it.
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
            raise LinearizeError(f"--keep-heads {text}: {part!r} is no layer and KV heads. Write {FORM}")
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
                f"--keep-heads {text}: layer {layer} of {model} has {site.kv_heads} KV heads (0 to "
                f"{site.kv_heads - 1}), and {max(heads)} is none of them"
            )
        if len(heads) == site.kv_heads:
            raise LinearizeError(
                f"--keep-heads {text}: these are all {site.kv_heads} KV heads of layer {layer}, which leaves none to "
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

    A layer with one KV head has none: all of its heads, or none, keep softmax.
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
            f"--keep-heads {text}: no layer that becomes linear has several KV heads whose softmax can be kept"
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
