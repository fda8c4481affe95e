"""What a model is trained on: text, masked text or images."""

from __future__ import annotations

from typing import Any, Literal

from ..errors import IncompatibleError
from ..verify.child.inputs import make_inputs

Kind = Literal["text", "masked", "images"]


def kind_of(model: Any) -> Kind:
    """What a model is trained on."""
    if model.main_input_name == "pixel_values":
        return "images"
    return "text" if model.can_generate() else "masked"


def has_head(model: Any) -> bool:
    """Whether it predicts tokens or classes; transformers calls a model without head ...Model or ...Backbone, and
    ...WithProjection where it also puts out a vector of the whole."""
    name = type(model).__name__.removesuffix("WithProjection").removesuffix("LMHeadModel")
    return not name.endswith(("Model", "Backbone"))


def check_trains(model: Any, kind: Kind) -> None:
    """Refuse (exit 3) a model that is no model of single images, of one text, or of masked text."""
    name, instead = type(model).__name__, "Train its mixers in a loop of your own: they are ordinary parameters"
    inputs = make_inputs(model, 1, 4)
    if kind != "images" and model.main_input_name != "input_ids":
        message = f"{name} takes {model.main_input_name}, and finetune has data of text and of images alone"
    elif kind != "images" and model.config.is_encoder_decoder:
        message = f"{name} reads one text and writes another, and finetune has data of single texts alone"
    elif [*inputs] != [model.main_input_name]:
        message = f"{name} takes {' and '.join(inputs)} together, and finetune has data of one of them alone"
    elif kind == "images" and inputs["pixel_values"].ndim != 4:
        message = f"{name} takes video, and finetune has data of text and of images alone"
    elif kind == "masked" and has_head(model) and model.get_output_embeddings() is None:
        message = f"{name} predicts no tokens, and of text finetune has no other labels"
        instead = "Convert the model with its head for masked tokens, or without a head (feature_cosine)"
    else:
        return
    raise IncompatibleError(f"{message}. {instead}")
