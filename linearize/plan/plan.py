"""The plan: which layer becomes what. A value to print, store and compare before anything is written."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from linearize_kernels.layers.rotary import resolve_rope
from linearize_kernels.mixer import AttentionSite

from ..errors import IncompatibleError, LinearizeError, some
from ..probe.found import Found, Other
from ..terminal.output import counted, layers_named, ranges
from .dropped_features import dropped_features
from .keep import LOCAL, SINK, Choice, Group, KeptWindow, WindowChoice, is_auto
from .mechanisms import build_mixer, load_mechanism, mechanism_names, present_options, resolve_options

LAYERS = "0-3,7 or every:2 or all"  # how --layers may be written
FORMS = {"--layers": LAYERS, "--keep-softmax": "0-3,7 or every:4 or every:4:3 or auto:2", "--restore": "0-3,7"}
DIFFUSERS = "diffusers"  # the model type of plans for pipelines of diffusers


# Fields that were renamed: the name in plans of earlier versions -> today's.
RENAMED_FIELDS = {"held": "cached_tokens", "again": "reconversions"}


@dataclasses.dataclass(frozen=True)
class Step:
    """One attention module becomes linear."""

    site: AttentionSite
    mechanism: str
    options: dict[str, Any]
    new_parameters: int
    state_bytes: int


@dataclasses.dataclass(frozen=True)
class Pass:
    """A conversion of what was converted before: of the folder of that name, in which `added` modules became linear
    and `restored` ones got softmax back, by path. `untrained` are the linear ones that nothing had trained then;
    `recipe` is the resolved one by which the folder was trained, if it was."""

    folder: str
    added: tuple[str, ...]
    restored: tuple[str, ...]
    untrained: tuple[str, ...]
    recipe: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion, decided. `steps` are the layers that change: `linear` ones, and `local` ones, which keep softmax
    over a window. `kept` are the layers that keep softmax over all tokens; `others` says of other modules that mix
    tokens why they stay as they are. `reads_masks`, `cached_tokens`: see `probe.Found`.

    `dtype` is that of the result; source weights are rewritten in it when `cast`, rewritten as safetensors when
    `pickled`, and else copied byte for byte: as hard links where the disk allows, unless `copy`. `needed_bytes` is
    what is written anew.
    """

    source: str
    revision: str | None
    architecture: str
    model_type: str
    dtype: str
    cast: bool
    pickled: bool
    steps: tuple[Step, ...]
    kept: tuple[AttentionSite, ...]
    source_bytes: int
    needed_bytes: int
    # Fields that were added since the first plans have defaults, for folders of before.
    others: tuple[str, ...] = ()
    reads_masks: bool = False
    cached_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    copy: bool = False
    choice: Choice | None = None  # where linearize chose the layers that are kept
    heads_choice: Choice | None = None  # where it chose the heads of linear layers that keep softmax
    window_choice: WindowChoice | None = None  # where it measured which kept layers may have a window
    source_dtype: str = ""  # as the source's weights were stored; empty in plans of earlier versions
    reconversions: tuple[Pass, ...] = ()  # conversions of the result, the last one last; `source` stays the first one's

    @property
    def rounding(self) -> str:
        """What becomes of the source's dtype, where the result has another one; empty where it has not."""
        if not self.cast or self.source_dtype in ("", self.dtype):
            return ""
        return f"the source's {self.source_dtype} weights are stored as {self.dtype}"

    @property
    def new_parameters(self) -> int:
        return sum(step.new_parameters for step in self.steps)

    @property
    def local(self) -> tuple[Step, ...]:
        """The layers that keep softmax over the last tokens and the first ones, beside others that are linear."""
        found = tuple(step for step in self.steps if step.mechanism == LOCAL)
        return found if len(found) < len(self.steps) else ()

    @property
    def linear(self) -> tuple[Step, ...]:
        """The layers that do not keep softmax."""
        local = self.local
        return tuple(step for step in self.steps if step not in local)

    @property
    def softmax_layers(self) -> list[int]:
        """The layers that keep softmax, over all tokens or over a window."""
        return sorted([site.layer for site in self.kept] + [step.site.layer for step in self.local])

    @property
    def softmax(self) -> str:
        """Which layers keep softmax, and over what: `layers 4-5 keep softmax`; empty where none does."""

        def keep(layers: list[int]) -> str:
            return f"layer {layers[0]} keeps softmax" if len(layers) == 1 else f"layers {ranges(layers)} keep softmax"

        parts = [keep([site.layer for site in self.kept])] if self.kept else []
        for options in {tuple(step.options.items()): step.options for step in self.local}.values():
            layers = [step.site.layer for step in self.local if step.options == options]
            reach = f"the last {options['window']:,} tokens and the first {options['sink']}"
            parts.append(f"{keep(layers)} over {reach}")
        return "; ".join(parts)

    @property
    def attention(self) -> str:
        """What the layers have: `gsa in layers 0-1,3; softmax in layer 2`."""
        found: dict[str, list[int]] = {}
        for step in self.linear:
            found.setdefault(step.mechanism, []).append(step.site.layer)
        found |= {"softmax": self.softmax_layers} if self.softmax_layers else {}
        return "; ".join(f"{name} in {layers_named(layers)}" for name, layers in found.items())

    @property
    def notes(self) -> list[str]:
        """What the conversion drops, by name and layers."""
        found = dropped_features(step.site for step in self.steps)
        dropped = [step.site.layer for step in self.steps if step.site.sr == "drop"]
        lines = [f"{feature.name}: {feature.what} ({layers_named(layers)})" for feature, layers in found.items()]
        reduction = "reduction: the source attends to fewer keys than queries, the linear layer to a key for each"
        return lines + ([f"{reduction} ({layers_named(dropped)})"] if dropped else [])

    def spec(self) -> dict[str, Any]:
        """What the saved config carries, enough to rebuild the mixers without probing."""
        layers = [
            {"site": dataclasses.asdict(s.site), "mechanism": s.mechanism, "options": s.options} for s in self.steps
        ]
        # Then nothing needs a T x T mask, and none is made.
        alone = not (self.kept or self.others or self.reads_masks)
        return {"format": 1, "all_linear": alone, "layers": layers}

    def cache_bytes(self, tokens: int) -> dict[str, int]:
        """Decode memory per sequence after `tokens` tokens: of the source, and of the converted model."""
        item = item_bytes(self.dtype)

        def kv(site: AttentionSite, heads: int) -> int:
            row = heads * (site.key_dim + site.value_dim) * item * site.causal
            return min(tokens, self.cached_tokens.get(site.path, tokens)) * row

        kept, sites = sum(kv(site, site.kv_heads) for site in self.kept), [step.site for step in self.steps]
        softmax = sum(kv(site, len(site.softmax_groups)) for site in sites)
        return {
            "source": kept + sum(kv(site, site.kv_heads) for site in sites),
            "converted": kept + softmax + sum(step.state_bytes for step in self.steps),
        }

    @property
    def softmax_groups(self) -> list[Group]:
        """The heads of linear layers that keep softmax, by layer and KV head."""
        return [(step.site.layer, head) for step in self.steps for head in step.site.softmax_groups]

    def to_json(self) -> dict[str, Any]:
        """Everything above as plain JSON values."""
        return {
            **dataclasses.asdict(self),
            "new_parameters": self.new_parameters,
            "notes": self.notes,
            "decode_bytes": {str(tokens): self.cache_bytes(tokens) for tokens in (4096, 131072)},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_json`; what a plan of an earlier version does not say has its default."""
        data = {RENAMED_FIELDS.get(name, name): value for name, value in data.items()}
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        fields["steps"] = tuple(Step(**{**s, "site": AttentionSite.from_dict(s["site"])}) for s in data["steps"])
        fields["kept"] = tuple(AttentionSite.from_dict(s) for s in data["kept"])
        fields["others"] = tuple(data.get("others", ()))
        fields["reconversions"] = tuple(Pass(**tuples(one)) for one in data.get("reconversions", ()))
        for name, kind in {"choice": Choice, "heads_choice": Choice, "window_choice": WindowChoice}.items():
            fields[name] = kind(**tuples(data[name])) if data.get(name) else None
        return cls(**fields)


def tuples(data: dict[str, Any]) -> dict[str, Any]:
    """Fields of a dataclass out of JSON, which has lists for tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def item_bytes(dtype: str) -> int:
    """Bytes of one number of a floating dtype."""
    return torch.finfo(getattr(torch, dtype)).bits // 8


def choose_layers(
    found: Found, layers: str, keep_softmax: str, model: str = "the model"
) -> tuple[list[AttentionSite], list[AttentionSite]]:
    """Split sites of `model` into (to convert, to keep), from `all`, `0-3,7` or `every:2`, and the layers to leave:
    `0-3,7` or `every:4`.

    Raises LinearizeError: 2 for a malformed selection or a layer that is not there, 3 for one that cannot be linear.
    """
    if is_auto(keep_softmax):
        raise IncompatibleError(
            f"--keep-softmax {keep_softmax} compares predictions of text, and {model} writes none. Name the layers, "
            "such as --keep-softmax 0,3"
        )
    known = [site.layer for site in found.sites]
    if not layers.strip(" ,"):
        raise LinearizeError(f"--layers is empty: it names no layer to convert. Write {FORMS['--layers']}")
    chosen = set(known) if layers == "all" else layer_set(layers, "--layers", found, model)
    chosen -= layer_set(keep_softmax, "--keep-softmax", found, model)
    if not chosen:
        raise LinearizeError(f"--layers {layers} with --keep-softmax {keep_softmax} leaves no layer to convert")
    return [s for s in found.sites if s.layer in chosen], [s for s in found.sites if s.layer not in chosen]


def layer_set(text: str, flag: str, found: Found, model: str) -> set[int]:
    """The layers among those `found` that an option names, such as `0-3,7`, `every:2` or `every:4:3`, which begins at
    layer 3. Raises as `choose_layers`."""
    known = [site.layer for site in found.sites]
    form = FORMS[flag]
    if text.startswith("every:"):
        every, _, first = text.removeprefix("every:").partition(":")
        step, begin = (_number(part, f"{flag} {text}", form) for part in (every, first or "0"))
        if step < 1:
            raise LinearizeError(f"{flag} {text}: every:N needs N >= 1")
        if begin >= len(known):
            there = counted(len(known), "layer")
            raise LinearizeError(f"{flag} {text}: {model} has {there}, and it begins behind them")
        return set(known[begin::step])
    chosen, beyond = _numbers(text, f"{flag} {text}", form, max(known))
    missing = chosen - {*known}
    for other in found.others:
        if other.layer is not None and (other.layer in missing or any(other.layer in part for part in beyond)):
            raise IncompatibleError(f"{flag} {text}: {other}. Choose among layers {ranges(known)}")
    if beyond and known == list(range(len(known))):
        there = f"{model} has {counted(len(known), 'layer')} ({ranges(known)})"
        raise LinearizeError(f"{flag} {text}: {_lacking(missing, beyond, 'not exist')}; {there}")
    if missing or beyond:
        lacking = _lacking(missing, beyond, "not have softmax attention")
        raise LinearizeError(f"{flag} {text}: {lacking}; {model} has it in {ranges(known)}")
    return chosen


def _lacking(missing: set[int], beyond: list[range], what: str) -> str:
    """`layer 4 does not exist`, `layers 2,4-9 do not exist`: those `missing`, and those beyond all that there are."""
    parts = [f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in beyond]
    names = ",".join(filter(None, (ranges([*missing]), *parts)))
    return f"layer {names} does {what}" if names.isdecimal() else f"layers {names} do {what}"


def _numbers(text: str, where: str, form: str, largest: int) -> tuple[set[int], list[range]]:
    """The layers of `0-3,7`, and those beyond the `largest` that there is, which may be very many."""
    chosen, beyond = set[int](), list[range]()
    for part in filter(None, (p.strip() for p in text.split(","))):
        low, dash, high = part.partition("-")
        if part.startswith("-") or high.startswith("-"):
            raise LinearizeError(f"{where}: layers count from 0, and {part} is below. Write {form}")
        first = _number(low, where, form)
        last = _number(high, where, form) if dash else first
        if last < first:
            raise LinearizeError(f"{where}: {part} runs backwards")
        chosen |= {*range(first, min(last, largest) + 1)}
        if last > largest:
            beyond.append(range(max(first, largest + 1), last + 1))
    return chosen, beyond


def _number(text: str, where: str, form: str) -> int:
    if not text.strip().isdecimal() or len(text) > 9:
        raise LinearizeError(f"{where}: {text!r} is no layer number. Write {form}")
    return int(text)


def grouped(others: tuple[Other, ...]) -> tuple[str, ...]:
    """A line for each class of module that stays as it is: where it is, and why."""
    groups: dict[tuple[str, str], list[Other]] = {}
    for other in others:
        groups.setdefault((other.kind, other.reason), []).append(other)
    lines = []
    for (kind, reason), members in groups.items():
        layers = sorted({other.layer for other in members if other.layer is not None})
        where = f"in {layers_named(layers)}" if layers else some([other.path for other in members])
        lines.append(f"{kind} {where}: {reason}")
    return tuple(lines)


def resolve_rotation(found: Found, steps: tuple[Step, ...], beside: bool = False) -> tuple[Step, ...]:
    """The steps with what `rope=auto` stands for: behind the feature map only where attention is given a rotation that
    can be moved there, and no softmax is `beside` all mixers."""
    resolved = []
    for step in steps:
        if step.options.get("rope") == "auto":
            # What needs q and k rotated.
            exact = beside or step.options.get("window", 0) or len(step.site.softmax_groups)
            place = resolve_rope("auto", exact) if step.site.path in found.rotated else "before"
            step = dataclasses.replace(step, options={**step.options, "rope": place})
        resolved.append(step)
    return tuple(resolved)


def rotation_asked(step: Step) -> tuple[Any, str]:
    """Where a step's mixer wants q and k rotated, as its option `rope` says it, and what says so."""
    if load_mechanism(step.mechanism).unrotated:
        return False, f"{step.mechanism} without a rotary embedding"
    place = step.options.get("rope", True)
    return place, f"rope={str(place).lower()}"


def check_rotation(found: Found, steps: tuple[Step, ...]) -> None:
    """Raise LinearizeError (exit 3) where mixers without rotary embedding were asked for and would get it, or with one
    behind their features and would get none."""
    taken = (False, "off", "after")
    wrong = [s for s in steps if s.site.path in found.fixed_rotation and rotation_asked(s)[0] in taken]
    wrong += [s for s in steps if s.site.path in found.numbered and rotation_asked(s)[0] == "after"]
    if wrong:
        (place, asked), sites = rotation_asked(wrong[0]), [step.site for step in wrong]
        use, what = ("Set rope=true", "taken away") if place is False else ("Set rope=before", "taken away or moved")
        use = use if "rope" in wrong[0].options else "Choose another mechanism"
        raise IncompatibleError(
            f"{asked}: {sites[0].kind} at {layers_named(site.layer for site in sites)} is not given its rotation by "
            f"an argument position_embeddings, so it cannot be {what}. {use}"
        )


def check_unused_options(found: Found, steps: tuple[Step, ...], given: dict[str, Any]) -> None:
    """Raise LinearizeError (exit 2) for an option that was given and has no effect at any site."""
    for name, value in given.items():
        option, layers = name.partition("@")[0], own_layers(name, [step.site for step in steps])
        concerned = [s for s in steps if s.site.layer in layers]
        unused = [load_mechanism(s.mechanism).unused_options(s.site, s.site.path in found.flat) for s in concerned]
        reasons = [options.get(option) for options in unused]
        if all(reasons):
            raise LinearizeError(f"{name}={value} has no effect in this model: {reasons[0]}. Leave it out")


def fitting(found: Found, mechanism: str, model: str) -> Found:
    """`found`, in which what `mechanism` does not fit stays as it is: one tower of two, one stage of several.

    Raises LinearizeError (exit 3) when it fits no site, naming the mechanisms that do.
    """
    reasons = [(site, mismatch(site, mechanism)) for site in found.sites]
    unfit = tuple(Other(site.layer, site.path, site.kind, reason) for site, reason in reasons if reason)
    sites = tuple(site for site, reason in reasons if not reason)
    if not sites:
        others = [name for name in mechanism_names() if any(not mismatch(site, name) for site in found.sites)]
        instead = f"Choose {' or '.join(others)}" if others else "No mechanism fits"
        site = unfit[0]
        raise IncompatibleError(f"--to {mechanism}: {model} has no place for it: {site.path} {site.reason}. {instead}")
    return dataclasses.replace(found, sites=sites, others=(*found.others, *unfit))


def mismatch(site: AttentionSite, mechanism: str) -> str | None:
    """Why a mechanism does not fit a site, after the name of the site; None where it does."""
    mixer_class = load_mechanism(mechanism)
    if not (mixer_class.causal if site.causal else mixer_class.bidirectional):
        return f"is {'causal' if site.causal else 'bidirectional'}; {mechanism!r} is not"
    obstacle = mixer_class.obstacle(site)
    return obstacle and f"does not fit {mechanism!r}: {obstacle}"


def make_steps(sites: list[AttentionSite], mechanism: str, given: dict[str, Any], item: int = 4) -> tuple[Step, ...]:
    """A step per site of a model whose activations have `item` bytes.

    `sr` among the options is for attention that reduces its keys: `keep` them so, or `drop` the reduction. An option
    with `@` and layers behind its name is for those alone: `rows=4`, but `rows@0-3=7`.

    Raises LinearizeError: 2 for unknown names and bad options, 3 for an unfit mechanism.
    """
    given = present_options(mechanism, given)
    sr = given.pop("sr", None)
    if sr not in (None, "keep", "drop"):
        raise LinearizeError(f"sr={sr}: must be keep or drop")
    mixer_class, steps = load_mechanism(mechanism), []
    owners = {name: own_layers(name, sites) for name in given}
    for name, value in given.items():  # also without sites
        resolve_options(mechanism, {**own_options(given, {}, None), name.partition("@")[0]: value})
    for site in sites:
        options = resolve_options(mechanism, own_options(given, owners, site.layer), site)
        reason = mismatch(site, mechanism)
        if reason:
            raise IncompatibleError(f"{site.path} {reason}")
        if site.reduction:
            site = dataclasses.replace(site, sr=reduced(sr, site, mechanism, mixer_class.square))
        with torch.device("meta"):
            if site.softmax_groups and build_mixer(mechanism, site.linear_part(), options).skip_qk_norm:
                raise IncompatibleError(
                    f"--keep-heads: {mechanism} takes q and k as nothing has shaped them, and heads that keep softmax "
                    "need them rotated. Keep whole layers: --keep-softmax"
                )
            mixer = build_mixer(mechanism, site, options)
        new = sum(p.numel() for p in mixer.parameters())
        steps.append(Step(site, mechanism, options, new, mixer.state_bytes(0, item) if site.causal else 0))
    if sr is not None and sites and not any(site.reduction for site in sites):
        raise LinearizeError(f"sr={sr}: no attention here computes fewer keys than queries. Leave it out")
    return tuple(steps)


def local_steps(kept: list[AttentionSite], window: KeptWindow, found: Found, item: int = 4) -> tuple[Step, ...]:
    """Steps for those of the `kept` sites that may have the `window`: softmax over the last tokens and the first ones.
    A site whose own window bounds its cache already gets none.

    Raises LinearizeError: 2 where that leaves no site, and for a layer that is named and keeps no softmax, 3 for a site
    whose softmax does more than a window computes.
    """
    asked = f"--kept-window {window}"
    if not kept:
        raise LinearizeError(f"{asked}: no layer keeps softmax. Name some, or how many: --keep-softmax auto:2")
    if window.layers:
        there = {site.layer for site in kept}
        named, beyond = _numbers(window.layers, asked, "4096@0-3,7", max(there))
        if beyond or not named or named - there:
            wrong = _lacking(named - there, beyond, "not keep softmax") if named or beyond else "it names no layer"
            raise LinearizeError(f"{asked}: {wrong}. Choose among layers {ranges(sorted(there))}")
        kept = [site for site in kept if site.layer in named]
    local = [site for site in kept if site.path not in found.cached_tokens]
    if not local:
        raise LinearizeError(f"{asked}: the layers that keep softmax have windows of their own. Leave it out")
    for site in local:
        more = ", ".join(site.extras)
        reason = f"gives its softmax {more}, which the window would ignore" if more else mismatch(site, LOCAL)
        if reason:
            raise IncompatibleError(f"{asked}: {site.path} {reason}. Leave it out")
    return make_steps(local, LOCAL, {"window": window.tokens, "sink": SINK}, item)


def own_layers(name: str, sites: list[AttentionSite]) -> set[int]:
    """The layers among those of `sites` that an option is for: all, or those of `rows@0-3,7`.

    Raises LinearizeError (exit 2) for layers that it does not name, or that are not there.
    """
    known = {site.layer for site in sites}
    _, at, text = name.partition("@")
    if not at:
        return known
    named, beyond = _numbers(text, name, "rows@0-3,7=4", max(known, default=0))
    if not named and not beyond:
        raise LinearizeError(f"{name}: no layer is named. Write rows@0-3,7=4")
    if known and (beyond or named - known):
        wrong = _lacking(named - known, beyond, "not become linear")
        raise LinearizeError(f"{name}: {wrong}. Name layers among {ranges(sorted(known))}")
    return named


def own_options(given: dict[str, Any], owners: dict[str, set[int]], layer: int | None) -> dict[str, Any]:
    """The options given for one layer (None: for all layers), of which those that name it come last."""
    common = {name: value for name, value in given.items() if "@" not in name}
    own = {n.partition("@")[0]: value for n, value in given.items() if "@" in n and layer in owners.get(n, ())}
    return common | own


def reduced(sr: str | None, site: AttentionSite, mechanism: str, square: bool) -> str:
    """`keep` or `drop`: what becomes of a site's reduction of keys. `square`: the mechanism needs a key per query."""
    if sr == "keep" and square:
        raise IncompatibleError(
            f"sr=keep: {site.path} computes fewer keys than queries, and {mechanism!r} needs one for each. Leave sr "
            "out (it is then drop), or choose la"
        )
    return sr or ("drop" if square else "keep")
