"""Mechanisms by name. The kernels folder is the registry; a mixer's signature describes its options."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from ..checkpoint.flatten import flat_files, flat_name, kernel_files, kernels_folder
from ..errors import LinearizeError, did_you_mean
from ..terminal.output import unwrapped

MIXER_CLASS = re.compile(r"^class (\w+)\((?:\w+, )*Mixer\):", re.MULTILINE)


@functools.cache
def mechanism_names() -> tuple[str, ...]:
    """Mechanisms: folders of the kernels folder whose file of the same name defines a mixer; none is imported."""
    files = [path for path in kernels_folder().glob("*/*.py") if path.stem == path.parent.name]
    return tuple(sorted(path.stem for path in files if MIXER_CLASS.search(path.read_text("utf-8"))))


def check_name(name: str) -> None:
    """Raise LinearizeError (exit 2) for an unknown mechanism; imports none."""
    known = mechanism_names()
    if name not in known:
        raise LinearizeError(f"unknown mechanism {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")


@functools.cache
def load_mechanism(name: str) -> Any:
    """The Mixer subclass of mechanism `name`. Raises LinearizeError (exit 2) for an unknown name."""
    check_name(name)
    from linearize_kernels.mixer import own_mixer

    importlib.import_module("linearize_kernels.window.window")  # an option of every mixer, in a file that few need
    return own_mixer(importlib.import_module(f"linearize_kernels.{name}.{name}"))


@functools.cache
def known_options(mixer: Any, base: str | None = None) -> Mapping[str, tuple[Any, Any, Any]]:
    """The mixer's `option_types`, kept: they are read from a signature, and plans ask several times for each layer."""
    from linearize_kernels.mixer import option_types

    return option_types(mixer, base)


# Options that were renamed: old name -> new. Configs and recipes of earlier versions have the old ones.
RENAMED_OPTIONS = {"features": "feature_map", "phi": "feature_map", "gate_heads": "state_heads"}


def present_option(option: str) -> str:
    """The present name of an option that may have its old one, with the layers that it is for: `phi@0-3`."""
    name, at, layers = option.partition("@")
    return RENAMED_OPTIONS.get(name, name) + at + layers


# Values that were renamed, by option, for mechanisms where it is a choice now: old value -> new.
RENAMED_VALUES: dict[str, dict[Any, str]] = {
    "rope": {True: "before", False: "off", "true": "before", "false": "off", "True": "before", "False": "off"}
}


def renamed_options(name: str, options: dict[str, Any]) -> dict[str, str]:
    """Those of `options` that mechanism `name` had under another name: old -> new."""
    mixer, base = load_mechanism(name), options.get("base")
    known = known_options(mixer, base if base in mixer.bases else None)
    new = {old: present_option(old) for old in options if old.partition("@")[0] not in known}
    return {old: present for old, present in new.items() if present != old and present.partition("@")[0] in known}


def present_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """`options` of mechanism `name` under the names and with the values that they have now; unknown ones stay as they
    are. Raises LinearizeError (exit 2) for an option that is given by two of its names."""
    mixer, base = load_mechanism(name), options.get("base")
    known = known_options(mixer, base if base in mixer.bases else None)
    renamed, named = renamed_options(name, options), {}
    for option, value in options.items():
        present = renamed.get(option, option)
        if present in named:
            both = " and ".join(one for one in options if renamed.get(one, one) == present)
            raise LinearizeError(f"{both} are one option of {name}, which is called {present} now. Give it once")
        named[present] = value
    for option, values in RENAMED_VALUES.items():
        if option in named and option in known and set(values.values()) <= set(typing.get_args(known[option][0])):
            named[option] = next((new for old, new in values.items() if old == named[option]), named[option])
    return named


def parts_of(name: str, site: Any, options: dict[str, Any]) -> dict[str, str]:
    """The kernel files that `options` of mechanism `name` at a site switch on: flat name -> a name in the file.

    Options that are not given have their defaults, and may have the names that an earlier version gave them.
    """
    mixer, options = load_mechanism(name), present_options(name, options)
    known = known_options(mixer, options.get("base") if mixer.bases else None)
    places = mixer.parts(site, {option: default for option, (_, _, default) in known.items()} | options)
    return {flat_name(place): what for place, what in places.items()}


def resolve_options(name: str, given: dict[str, Any], site: Any = None) -> dict[str, Any]:
    """All options of mechanism `name`: its defaults, or with `faithful` as published (for `site`, where papers differ
    between kinds of sites), overridden by `given`.

    Values may be strings, as from `--set slots=64`. Raises LinearizeError (exit 2) naming the option and its range.
    """
    mixer, base = load_mechanism(name), None
    kinds, given = known_options(mixer), present_options(name, given)
    if mixer.bases and "base" in given:
        base = _parse("base", given["base"], *kinds["base"][:2])
        kinds = known_options(mixer, base)
    options = {option: default for option, (_, _, default) in kinds.items()}
    if _parse("faithful", given.pop("faithful", False), bool, None):
        options |= published_options(mixer, base, site)
    for switch, others in mixer.implied.items():
        if _parse(switch, given.get(switch, options[switch]), bool, None):
            options |= others
    for option, value in given.items():
        if option not in kinds:
            raise LinearizeError(_unknown(option, name, mixer, [*kinds, "faithful"], base))
        expected, bounds, _ = kinds[option]
        options[option] = _parse(option, value, expected, bounds)
    return options


def with_own_eps(name: str, given: dict[str, Any], config: Any) -> dict[str, Any]:
    """`given`, and the eps of the source's norms where mechanism `name` has an option of that name and none is given:
    the formats of engines have one number for both."""
    own = getattr(config.get_text_config(), "rms_norm_eps", None)
    left_open = "eps" in known_options(load_mechanism(name)) and not {"eps", "faithful"} & given.keys()
    return {"eps": own, **given} if left_open and own else given


def option_about(mixer: Any, option: str, base: str | None = None) -> str:
    """What an option of a mechanism, over `base` where it has bases, sets: one line; empty where nobody wrote it."""
    owners = [mixer, *([mixer.base_for(base or known_options(mixer)["base"][2])] if mixer.bases else [])]
    texts = [base.__dict__.get("about", {}).get(option) for owner in owners for base in owner.__mro__[:-1]]
    own = [text for text in texts if text]
    return own[0] if own else ""


def published_options(mixer: Any, base: str | None = None, site: Any = None) -> dict[str, Any]:
    """Options under which a mechanism, over `base` where it has bases, behaves as published at a site."""
    if not mixer.bases:
        return mixer.published_at(site)
    known = known_options(mixer, base)
    own = mixer.base_for(base or known["base"][2]).published_at(site)
    return {name: value for name, value in own.items() if name in known} | mixer.published_at(site)


def _unknown(option: str, name: str, mixer: Any, known: list[str], base: str | None) -> str:
    """That a mechanism, over its base, has no such option, and which base has it."""
    owners = [f"base={other}" for other in mixer.bases if option in known_options(mixer, other)]
    over = f" over {base or known_options(mixer)['base'][2]}" if mixer.bases else ""
    hint = f" It belongs to {' and '.join(owners)}." if owners else did_you_mean(option, known)
    return f"{option}: {name}{over} has no such option.{hint} Known: {', '.join(known)}"


def _parse(option: str, value: Any, expected: Any, bounds: Any) -> Any:
    """`value` as `expected`, within `bounds`."""
    if typing.get_origin(expected) is typing.Literal:
        choices = typing.get_args(expected)
        if value not in choices:
            hint = did_you_mean(str(value), choices)
            raise LinearizeError(f"{option}={value}: must be one of {', '.join(choices)}.{hint}")
        return value
    if expected is bool:
        words = {"true": True, "false": False}
        if str(value).lower() not in words:
            raise LinearizeError(f"{option}={value}: must be true or false")
        return words[str(value).lower()]
    try:
        number = expected(value)
        exact = not isinstance(value, float) or number == value
    except (TypeError, ValueError):
        exact = False
    if not exact or isinstance(value, bool):
        raise LinearizeError(f"{option}={value}: must be {'a whole number' if expected is int else 'a number'}")
    if not bounds.low <= number <= bounds.high:
        raise LinearizeError(f"{option}={value}: must be >= {bounds.low:g} and <= {bounds.high:g}")
    return number


def parse_settings(settings: list[str]) -> dict[str, str]:
    """`["slots=64"]` -> `{"slots": "64"}`. Raises LinearizeError (exit 2) for a setting without `=` or given twice."""
    parsed: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise LinearizeError(f"{setting}: expected key=value, for example slots=64")
        if key in parsed:
            raise LinearizeError(f"{key}: given twice")
        parsed[key] = value
    return parsed


def parse_mechanism(text: str) -> tuple[str, dict[str, Any]]:
    """`"gsa:slots=64,rope=true"` -> the mechanism's name and all its options. Raises as `resolve_options` does."""
    name, _, settings = text.partition(":")
    return name, resolve_options(name, parse_settings(settings.split(",") if settings else []))


def to_settings(options: dict[str, Any]) -> list[str]:
    """Options as `parse_settings` takes them: `["slots=64", "rope=true"]`."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()]


def build_mixer(name: str, site: Any, options: dict[str, Any]) -> Any:
    """A mixer for one site; options that do not fit together become a LinearizeError (exit 2)."""
    from linearize_kernels.mixer import mixer_at

    try:
        return mixer_at(load_mechanism(name), site, options)
    except ValueError as error:
        raise LinearizeError(f"{name} at layer {site.layer}: {error}") from error


# ---------------------------------------------------------------- what there is to know about one

# The attention of Llama 3.2 1B, for numbers.
EXAMPLE: dict[str, Any] = {
    "layer": 0, "path": "model.layers.0.self_attn", "kind": "LlamaAttention", "hidden": 2048, "heads": 32,
    "kv_heads": 8, "key_dim": 64, "value_dim": 64, "scale": 0.125,
}  # fmt: skip
EXAMPLE_NAME = "a layer of Llama 3.2 1B"
EXAMPLE_TOKENS = 4096


def summary(name: str) -> dict[str, Any]:
    """What a mechanism is in a line, read from its file; importing torch to print a table would take seconds.

    Raises LinearizeError (exit 2) for an unknown name.
    """
    check_name(name)
    values = _plain_values("mixer", "nn.Module") | _plain_values(name, "Mixer")
    code = "".join(flat_files([name]).values())
    return {
        "name": name,
        **{key: values[key] for key in ("title", "paper", "causal", "bidirectional")},
        "backends": ["torch", *(["triton"] if re.search(r"^ +import triton", code, re.MULTILINE) else [])],
    }


def _plain_values(file: str, base: str) -> dict[str, Any]:
    """Strings, numbers and switches that the class derived from `base` in a kernel file sets, by name."""
    body = ast.parse(kernel_files()[file].read_text("utf-8")).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    own = next(node for node in classes if base in [ast.unparse(parent) for parent in node.bases])
    lines = [line for line in own.body if isinstance(line, ast.Assign | ast.AnnAssign)]
    targets = [line.target if isinstance(line, ast.AnnAssign) else line.targets[0] for line in lines]
    return {
        ast.unparse(target): line.value.value
        for target, line in zip(targets, lines, strict=True)
        if isinstance(line.value, ast.Constant)
    }


def describe(name: str) -> dict[str, Any]:
    """All there is to know about a mechanism without running it, from its own file; JSON.

    Raises LinearizeError (exit 2) for an unknown name.
    """
    check_name(name)
    import torch

    from linearize_kernels.mixer import AttentionSite

    mixer = load_mechanism(name)
    site = AttentionSite(**EXAMPLE, causal=mixer.causal)
    with torch.device("meta"):
        built = build_mixer(name, site, resolve_options(name, {}))
    return {
        **summary(name),
        "about": unwrapped(inspect.getdoc(mixer) or ""),
        "options": list(_options(mixer)),
        "state_formula": mixer.state_formula,
        "example": {
            "site": EXAMPLE_NAME,
            "new_parameters": sum(p.numel() for p in built.parameters()),
            "state_bytes": built.state_bytes(EXAMPLE_TOKENS, 2),
            "cache_bytes": 2 * EXAMPLE_TOKENS * site.kv_heads * (site.key_dim + site.value_dim),
            "tokens": EXAMPLE_TOKENS,
        },
    }


def _options(mixer: Any) -> Iterator[dict[str, Any]]:
    """An option: what it sets, its type, default, published value where that differs, and its range or choices."""
    published = published_options(mixer)
    for option, (expected, bounds, default) in known_options(mixer).items():
        choices = typing.get_args(expected)
        yield {
            "name": option,
            "about": option_about(mixer, option),
            "type": "choice" if choices else expected.__name__,
            "default": default,
            "published": published.get(option, default),
            **({"choices": list(choices)} if choices else {}),
            **({"low": bounds.low, "high": bounds.high} if bounds else {}),
        }
