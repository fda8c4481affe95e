"""Plan a conversion of what is converted: softmax layers become linear, linear ones get softmax back, or become linear
by another mechanism."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..errors import IncompatibleError, LinearizeError
from ..probe.found import Found
from ..terminal.output import layers_named, ranges
from .dropped_features import check_dropped_features
from .heads import keep_heads
from .keep import is_auto
from .plan import (
    Pass,
    Plan,
    check_rotation,
    check_unused_options,
    grouped,
    item_bytes,
    layer_set,
    make_steps,
    mismatch,
    resolve_rotation,
)
from .request import Request


def same_mechanism(old: Plan, options: dict[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    """Mechanism and options of new linear layers where none is named: those of the linear ones of `old`, and `options`.

    Raises LinearizeError (exit 2) where its layers are not all alike.
    """
    kinds = {step.mechanism for step in old.linear}
    if len(kinds) > 1:
        raise LinearizeError(
            f"{name} has layers of {' and '.join(sorted(kinds))}. Say which the new ones become: --to {min(kinds)}"
        )
    options_of = [step.options for step in old.linear]
    # What rope=auto became beside heads with softmax, and elsewhere.
    places = [("after", "before")[bool(step.site.softmax_groups)] for step in old.linear]
    if len(set(places)) > 1 and [one.get("rope") for one in options_of] == places:
        options_of = [one | {"rope": "auto"} for one in options_of]
    first = old.linear[0]
    if any(one != options_of[0] for one in options_of):
        raise LinearizeError(
            f"the {first.mechanism} layers of {name} have several options. Say which the new ones have: "
            f"--to {first.mechanism} --set key=value"
        )
    return first.mechanism, options_of[0] | options


def check_unused(mechanism: str | None, options: dict[str, Any], restore: str) -> None:
    """Raise LinearizeError (exit 2) for a mechanism or options beside `restore`, where no layer becomes linear."""
    if restore and (mechanism is not None or options):
        given = f"--to {mechanism}" if mechanism is not None else f"--set {next(iter(options))}"
        raise LinearizeError(
            f"{given} says what layers become, and --restore {restore} alone makes none linear. Leave it out, or name "
            "some with --layers"
        )


def plan_reconversion(
    request: Request,
    restore: str,
    given: dict[str, Any],
    old: Plan,
    found: Found,
    folder: str,
    untrained: set[str],
    recipe: dict[str, Any] | None,
) -> Plan:
    """The plan of a model in `folder`, converted by `old`, whose source has the attention `found`: `request.layers`
    become linear, and the layers `restore` get softmax back.

    `given` are the options that a person gave; `untrained` and `recipe` are as in `Pass`. Raises LinearizeError: 2
    for layers that are what they shall become, 3 for what does not fit.
    """
    check_request(request, restore, old, found, folder)
    mixers = {step.site.path: step for step in old.steps}
    linear = {step.site.path for step in old.linear}  # softmax over a window can become linear, and softmax over all
    back = chosen(restore, "--restore", found, folder, lambda path: path in mixers, "softmax")
    layers = "" if request.layers == "all" else request.layers
    alike = {
        path
        for path in linear
        if mixers[path].mechanism == request.mechanism
        and all(mixers[path].options.get(name) == value for name, value in given.items())
    }
    new = chosen(layers, "--layers", found, folder, lambda path: path not in alike, "linear")
    sites = []
    for layer in sorted(new):  # of two towers one may have no place for the mechanism
        here = [site for site in found.sites if site.layer == layer and site.path not in alike]
        sites += [site for site in here if not mismatch(site, request.mechanism)] or here
    check_dropped_features(sites, request.allow_drop)
    sites = keep_heads(request.keep_heads, sites, found, folder)
    steps = resolve_rotation(found, make_steps(sites, request.mechanism, request.options or {}, item_bytes(old.dtype)))
    check_rotation(found, steps)
    check_unused_options(found, steps, given)
    restored = [path for path, step in mixers.items() if step.site.layer in back]
    stay = {path: step for path, step in mixers.items() if path not in restored}
    known = stay | {step.site.path: step for step in steps}
    if not linear - {*restored} and not steps:
        raise LinearizeError(
            f"--restore {restore} leaves no linear layer in {folder}, and softmax everywhere is the model that it was "
            f"converted from: use {old.source}"
        )
    order = [site.path for site in found.sites]
    untrained = {path for path in untrained if path in stay} | {step.site.path for step in steps}
    done = Pass(folder, tuple(s.site.path for s in steps), tuple(restored), tuple(sorted(untrained)), recipe)
    numbers = sum(step.new_parameters for step in known.values())
    return dataclasses.replace(
        old,
        cast=False,
        pickled=False,
        steps=tuple(known[path] for path in order if path in known),
        kept=tuple(site for site in found.sites if site.path not in known),
        others=grouped(found.others),
        reads_masks=found.reads_masks,
        cached_tokens=found.cached_tokens,
        needed_bytes=numbers * item_bytes(old.dtype) + old.source_bytes * request.copy,
        copy=request.copy,
        choice=None,
        heads_choice=None,
        window_choice=None,
        reconversions=(*old.reconversions, done),
    )


def check_request(request: Request, restore: str, old: Plan, found: Found, folder: str) -> None:
    """Raise LinearizeError (exit 2) for what means nothing for a converted model, and where no layer is named."""
    if request.keep_softmax:
        how = "compares layers of a source" if is_auto(request.keep_softmax) else "is for a source"
        raise LinearizeError(
            f"--keep-softmax {request.keep_softmax} {how}, and {folder} is converted already. Name the layers that "
            "become linear (--layers 3), and those that get softmax back (--restore 3). A recipe trains it as it is "
            "with convert=null"
        )
    if is_auto(request.keep_heads):
        raise LinearizeError(
            f"--keep-heads {request.keep_heads} compares heads of a source, and {folder} is converted already. Name "
            "those of the layers that become linear: --layers 3 --keep-heads 3:0. A recipe trains it as it is with "
            "convert=null"
        )
    if request.keep_heads and request.layers == "all":
        raise LinearizeError(
            f"--keep-heads {request.keep_heads} is for layers that become linear, and none does: linear layers of "
            f"{folder} stay as they are. Give a layer softmax back (--restore 3), then convert it with its heads"
        )
    if request.kept_window is not None:
        raise LinearizeError(
            f"--kept-window {request.kept_window} is for a source, and {folder} is converted already. Convert "
            f"{old.source} with it"
        )
    if request.dtype not in ("keep", old.dtype):
        raise LinearizeError(
            f"--dtype {request.dtype}: {folder} is {old.dtype}, and its trained weights stay as they are. Leave it out"
        )
    if request.layers == "all" and not restore:
        paths = {step.site.path for step in old.linear}
        kinds = " and ".join(sorted({repr(step.mechanism) for step in old.linear}))
        left = [site.layer for site in found.sites if site.path not in paths]
        more = f"become linear (--layers {ranges(left)} for all that have softmax), or which " if left else ""
        raise IncompatibleError(
            f"{folder} has {kinds} in {layers_named(step.site.layer for step in old.linear)} already. To train it, "
            "use linearize finetune with convert=null. To convert it again, name the layers that "
            f"{more}get softmax back (--restore 3), or which become another mechanism (--layers 3 --to NAME)"
        )


def chosen(text: str, flag: str, found: Found, folder: str, fits: Callable[[str], bool], otherwise: str) -> set[int]:
    """The layers that `flag` names. Raises LinearizeError (exit 2) for one without a module that `fits`."""
    asked = layer_set(text, flag, found, folder)
    there = {site.layer for site in found.sites if fits(site.path)}
    wrong = sorted(asked - there)
    if wrong:
        instead = f"Choose among layers {ranges(sorted(there))}" if there else "No layer is left to choose"
        one = "layer {} is" if len(wrong) == 1 else "layers {} are"
        raise LinearizeError(f"{flag} {text}: {one.format(ranges(wrong))} {otherwise} in {folder} already. {instead}")
    return asked
