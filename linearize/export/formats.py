"""The formats of `linearize export --as`, and which of them holds a converted model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import Exit, LinearizeError
from . import granitemoehybrid, qwen3_5, to_gguf, windows


class Format(NamedTuple):
    """A format: the mechanism of its linear layers, the model types of the sources that it can represent, and the
    functions of its file."""

    name: str
    mechanism: str
    sources: tuple[str, ...]
    # (config of the converted model) -> why it does not fit, each reason with its layers.
    obstacles: Callable[[Any], list[str]]
    # (config of the converted model) -> the config that is written, as JSON.
    config: Callable[[Any], dict[str, Any]]
    # (config, weights of the converted model in fp32) -> weights in fp32 under the format's names.
    fold: Callable[[Any, dict[str, Tensor]], dict[str, Tensor]]
    # Ends of the names of tensors that stay fp32: decays, norms and their biases.
    precise: tuple[str, ...]


FILES = (qwen3_5, granitemoehybrid, windows)
FORMATS = {
    name: Format(name, file.MECHANISM, sources, file.obstacles, file.config_of, file.fold, file.PRECISE)
    for file in FILES
    for name, sources in file.SOURCES.items()
}
CHOICES = (*FORMATS, "auto", *to_gguf.FORMS)


def choose(form: str, config: Any, name: str) -> Format:
    """The format for a model, `auto` by its softmax layers and the mechanism of most others. Raises LinearizeError
    (exit 3), naming all that is not exact, where it does not fit."""
    model_type = config.get_text_config().model_type
    found = [layer["mechanism"] for layer in config.linearize["layers"]]
    own = windows.form_of(config)
    fitting = [
        one
        for one in FORMATS.values()
        if model_type in one.sources and (one.mechanism != windows.MECHANISM or one.name == own)
    ]
    fitting.sort(key=lambda one: -found.count(one.mechanism))
    if form == "auto" and not fitting:
        known = "; ".join(f"{one.name} holds {', '.join(one.sources)}" for one in FORMATS.values())
        message = f"{name} is a {model_type}, and no format holds its softmax layers exactly: {known}"
        raise LinearizeError(message, Exit.INCOMPATIBLE)
    chosen = fitting[0] if form == "auto" else FORMATS[form]
    wrong = chosen.obstacles(config)
    if model_type not in chosen.sources:
        other = f". For this one: --as {fitting[0].name}" if fitting else ""
        held = ", ".join(chosen.sources)
        wrong = [f"it holds softmax layers of {held} alone, and this is a {model_type}{other}"]
    elif chosen not in fitting and windows.MECHANISM in found:
        wrong.insert(0, f"its windows {'have' if own == 'granite_swa' else 'have no'} sink_logit: --as {own}")
    if wrong:
        raise LinearizeError(f"{name} is not exact as {chosen.name}: {'; '.join(wrong)}", Exit.INCOMPATIBLE)
    return chosen
