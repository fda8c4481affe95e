"""Probe: find a model's attention modules by running it once on the meta device.

A recording attention function is registered with transformers; one short forward then names every module that
calls it, with the shapes that it calls it with. A model that calls it nowhere runs once more, to find softmax in its
own code (own_softmax.py). No weights are read and no architecture is known by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import transformers
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from linearize_kernels.hf.attention_hooks import rotates
from linearize_kernels.hf.capture import OtherForm
from linearize_kernels.mixer import AttentionSite

from ..errors import IncompatibleError, LinearizeError, reason_of
from ..terminal.output import ranges
from .found import Found, Other
from .trace import PROBE, Run, interface_calls, own_softmax, quiet, slots_read

# Words in the class names of modules that mix tokens, and what is said of one that ran outside the interface.
MIXING = ("Attention", "Attn", "Mixer", "Mamba", "SSM", "DeltaNet", "ShortConv", "Recurrent", "LSTM", "Retention")
PLAIN_SLOTS = ("DynamicLayer", "DynamicSlidingWindowLayer")
NOT_ROUTED = "no softmax(q k) v over its tokens was seen in it"
# Names of numbers above 1, or switches, that make attention compute fewer keys than queries.
REDUCTIONS = re.compile(r"(reduction_ratio|^sr_ratio|^linear_attention)$")


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The transformers class that `architectures` names, else the causal class of the model type, else its bare one.

    Raises LinearizeError (exit 3) when transformers knows none.
    """
    for name in config.architectures or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        mapping: Any = auto._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise IncompatibleError(
        f"model type {config.model_type!r} with architectures {config.architectures} has no model class in "
        f"transformers {transformers.__version__}. Choose another checkpoint or upgrade transformers"
    )


_KEPT: dict[tuple[type, type, str], Found] = {}


def found_in(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> Found:
    """What `probe` found. For classes of transformers it is kept, by all that the config says but where it was read: a
    run plans several times."""
    if not model_class.__module__.startswith("transformers."):
        return probe(config, model_class)
    key = model_class, type(config), repr({**config.to_dict(), "_name_or_path": None})
    if key not in _KEPT:
        _KEPT[key] = probe(config, model_class)
    return _KEPT[key]


def probe(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> Found:
    """The softmax attention modules of a model, in the order in which they run, and what else mixes tokens in it.

    Raises LinearizeError (exit 3) when the model cannot be built or run on the meta device, or nothing in it fits.
    """
    run = _run(config, model_class)
    calls = Counter(record["path"] for record in run.records)
    others = _mixing_without_calls(run, calls)
    if not run.records:
        raise _nothing(run, others, config, model_class)
    slots = _cache_slots(config)
    free = {record["path"] for record in run.records if record.pop("rotation")}
    rotated = tuple(record["path"] for record in run.records if record["path"] in free and record["routed"])
    numbered = {record["path"] for record in run.records if record.pop("numbered", False)}
    flat = tuple(record["path"] for record in run.records if record.pop("flat"))
    calls -= _shared(run.records)
    sharing = _sharing(run)
    sites: list[AttentionSite] = []
    unfit: list[Other] = []
    for number, record in enumerate(run.records):
        site, reason = _site(number, record, calls, slots, config.is_encoder_decoder)
        reason = sharing.get(site.path, reason)
        if not reason and all(other.path != site.path for other in sites):
            sites.append(site)
        elif reason and all(other.path != site.path for other in unfit):
            unfit.append(Other(site.layer, site.path, site.kind, reason))
    windows = {n: slot.sliding_window for n, slot in enumerate(slots) if getattr(slot, "sliding_window", None)}
    cached_tokens = {site.path: windows[site.layer] - 1 for site in sites if site.causal and site.layer in windows}
    if len({site.layer for site in sites}) < len(sites):  # of two towers that count from 0
        sites = [dataclasses.replace(site, layer=number) for number, site in enumerate(sites)]
    if not sites:
        raise IncompatibleError(f"{model_class.__name__} has nothing to convert: {unfit[0]}")
    turned = {site.path for site in sites} if run.model and rotates(run.model) else set()
    return Found(
        tuple(sites),
        (*unfit, *others),
        run.reads_masks,
        fixed_rotation=tuple(sorted(turned - free)),
        rotated=rotated,
        numbered=tuple(sorted(turned & free & numbered)),
        flat=flat,
        cached_tokens=cached_tokens,
    )


def _run(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> Run:
    """A run with the calls of attention; without records where there are none, or where softmax has another form.

    Raises LinearizeError (exit 3) when the model cannot be built or run on the meta device.
    """
    whole = type(config)
    if whole is not model_class.config_class and model_class.config_class in whole.sub_configs.values():
        raise IncompatibleError(
            f"the config is a {whole.__name__}, of which {model_class.__name__} is the text part, as linearize export "
            "writes it for engines. Give the folder that was exported, or the model with the config of its text"
        )
    run = interface_calls(config, model_class)
    obstacle = run.error
    if not run.records:
        run = own_softmax(config, model_class)
        # A KeyError of that name: the class looks its attention up in a table of its own.
        if run.error is None or (isinstance(obstacle, KeyError) and obstacle.args == (PROBE,)):
            obstacle = run.error
        if isinstance(run.error, OtherForm):
            obstacle = None
    if obstacle:
        raise IncompatibleError(
            f"{model_class.__name__} cannot be probed on the meta device: {type(obstacle).__name__}: {obstacle}"
        ) from obstacle
    return run


def _nothing(run: Run, others: list[Other], config: Any, model_class: type[PreTrainedModel]) -> LinearizeError:
    """What to say of a model without softmax attention."""
    kinds = ", ".join(sorted({other.kind for other in others}))
    own = "computes no softmax over keys of its own"
    if isinstance(run.error, OtherForm):
        own = f"what it computes itself has another form: {reason_of(run.error)}"
    return IncompatibleError(
        f"no attention found: {model_class.__name__} ({config.model_type}) made no call through transformers' "
        f"attention interface and {own}. Attention-like modules seen: " + (kinds or "none")
    )


def _sharing(run: Run) -> dict[str, str]:
    """Why modules that share keys and values through the cache keep softmax, by path: a state has no keys to share."""
    readers: dict[int, list[str]] = {}
    for path, slot in slots_read(run).items():
        readers.setdefault(slot, []).append(path)
    numbers = {record["path"]: getattr(record["module"], "layer_idx", None) for record in run.records}
    reasons: dict[str, str] = {}
    for owner, *others in readers.values():  # keys are made before they are shared
        layers = [number for path in others if isinstance(number := numbers.get(path), int)]
        if others:
            whom = ", ".join(others)
            if len(layers) == len(others):
                whom = f"layer{'s' * (len(layers) > 1)} {ranges(layers)}"
            reasons[owner] = f"its keys and values serve {whom} as well, and a state has none to give"
        reasons |= dict.fromkeys(others, f"takes its keys and values from {owner}")
    return reasons


def _cache_slots(config: PreTrainedConfig) -> list[Any]:
    """The cache layers that generation will use, by layer; none where the config does not say."""
    try:
        with quiet():
            return DynamicCache(config=config.get_text_config(decoder=True)).layers
    except Exception:  # a config that no cache is made for
        return []


def _mixing_without_calls(run: Run, calls: Counter[str]) -> list[Other]:
    """Innermost modules named like attention or recurrence that made no call, nor hold or serve one that did."""
    found: list[Other] = []
    for path, module in run.model.named_modules() if run.model else ():
        inner = any(_mixes(part) for part in module.modules() if part is not module)
        if not _mixes(module) or inner or any(_within(path, call) or _within(call, path) for call in calls):
            continue
        layer = getattr(module, "layer_idx", None)
        reason = _unused(module) if path in run.ran else "does not run on text"
        found.append(Other(layer if isinstance(layer, int) else None, path, type(module).__name__, reason))
    return found


def _unused(module: Any) -> str:
    """Why a module that ran is no site."""
    if getattr(module, "query_stride", 1) > 1:
        return "pools its queries, so that fewer tokens come out than go in"
    return "is torch's own, its softmax out of reach" if isinstance(module, nn.MultiheadAttention) else NOT_ROUTED


def _within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(outer + ".")


def _mixes(module: nn.Module) -> bool:
    kind = type(module).__name__
    return any(word in kind for word in MIXING) and not kind.endswith(("Norm", "FeedForward", "MLP"))


def _site(
    number: int, record: dict[str, Any], calls: Counter[str], slots: list[Any], two_sided: bool
) -> tuple[AttentionSite, str | None]:
    """The site of a recorded call, and what keeps it from becoming linear (None: nothing).

    `two_sided`: the model is an encoder and a decoder.
    """
    module, keys, queries, denies = (record.pop(name) for name in ("module", "keys", "queries", "denies"))
    record["reduction"] = reduction_of(module)
    obstacle = None
    if keys != queries and not record["reduction"]:
        obstacle = "takes keys from elsewhere"
    elif record["hidden"] is None:
        obstacle = "gets no hidden states"
    elif calls[record["path"]] > 1:
        obstacle = f"calls attention {calls[record['path']]} times in a forward pass, and one state cannot serve them"
    elif two_sided and record["causal"]:
        obstacle = "is in a decoder that reads an encoder"
    elif denies:
        obstacle = "says that it is not causal, and is in a decoder, whose mask hides later tokens"
    layer = getattr(module, "layer_idx", None)
    layer = number if layer is None else int(layer)
    slot = type(slots[layer]).__name__ if layer < len(slots) else ""
    if obstacle is None and record["causal"] and slot not in ("", *PLAIN_SLOTS):
        obstacle = f"uses a cache layer of type {slot}, which also holds data that a linear state cannot replace"
    return AttentionSite(layer=layer, kind=type(module).__name__, **record), obstacle


def _shared(records: list[dict[str, Any]]) -> Counter[str]:
    """Calls of modules that serve several layers, all in the same way and bidirectional: one mixer, which has no state
    there, serves them too."""
    seen = ("causal", "keys", "queries", "grid", "prefix", "suffix", "extras")
    ways: dict[str, set[Any]] = {}
    for record in records:
        ways.setdefault(record["path"], set()).add(tuple(record[name] for name in seen))
    alike = {path for path, found in ways.items() if len(found) == 1 and not next(iter(found))[0]}
    return Counter(record["path"] for record in records if record["path"] in alike)


def reduction_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the attributes by which attention makes fewer keys than queries out of its input."""
    named = {name: value for name, value in vars(module).items() if REDUCTIONS.search(name)}
    return tuple(sorted(name for name, value in named.items() if value is True or value > 1))
