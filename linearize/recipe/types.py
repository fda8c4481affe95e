"""Types of recipe values: strict models, counts, ratios, budgets in tokens, lists of layers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ..plan.keep import KeptWindow
from .yaml import shown


class ParentError(ValueError):
    """A broken rule about several fields: reported at the mapping that holds them."""


def _tokens(value: Any) -> Any:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([kmb]?)", value.lower())):
        exact = Fraction(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2]]
        value = int(exact) if exact.denominator == 1 else value
    if type(value) is float and value.is_integer():  # 2e7
        value = int(value)
    if value is not None and type(value) is not int:
        raise ValueError(f"must be a whole number of tokens such as 20M, 1.5B or 300k, not {shown(value)}")
    return value


def _layers(value: Any) -> Any:
    """One spelling, the command line's, for [7, 15], 7 and '7,15'."""
    items = value if isinstance(value, list) else [value]
    return ",".join(map(str, items)) if all(type(item) in (int, str) for item in items) else value


def _window(value: Any) -> Any:
    """What `KeptWindow` reads, or null; its errors are this key's."""
    if value is not None:
        KeptWindow.parse(value)
    return value


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("names a part twice")
    if "all" in names and len(names) > 1:
        raise ValueError("'all' already includes the others")
    return names


def _not_tiny(value: float) -> float:
    if 0 < value < 1e-6:
        raise ValueError(f"must be 0 or >= 1e-06, not {shown(value)}")
    return value


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must be text without the character NUL, which no file's name may have")
    return text


def _layers_again(value: Any) -> Any:
    """auto, all or none of the layers, or their number."""
    if value == "auto" or isinstance(value, bool) or (isinstance(value, int) and value > 0):
        return value
    raise ValueError(f"must be auto, true, false, or a number of layers above 0, not {shown(value)}")


def as_list(value: Any) -> Any:
    """A list of one where there is only its entry."""
    return [value] if isinstance(value, str) else value


T = TypeVar("T")
Listed = Annotated[tuple[T, ...], Field(strict=False, min_length=1)]  # strict would refuse YAML's lists
Text = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]
Names = Annotated[
    tuple[Text, ...], Field(strict=False), BeforeValidator(as_list, json_schema_input_type=str | list[str])
]
Count = Annotated[int, Field(gt=0)]
RowLength = Annotated[int, Field(ge=2)]  # the first token of a row predicts nothing
Ratio = Annotated[float, Field(ge=0, le=1)]
Alpha = Annotated[float, Field(ge=0, le=100), AfterValidator(_not_tiny)]
Weight = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
# Of AdamW, which moves a weight by about so much a step; 1 is more than weights are.
Rate = Annotated[float, Field(gt=0, le=1)]
# What a moving average keeps at each step; one that kept all would never see a gradient.
Decay = Annotated[float, Field(ge=0, lt=1)]
# Of softmax: in float32 a KL at a higher one is lost in rounding, and a lower one is a maximum.
Temperature = Annotated[float, Field(ge=0.01, le=100)]
# Of a loss or an adapter: beyond, float32 or AdamW's eps of 1e-8 would lose the gradient.
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
OptionalFactor = Annotated[float, Field(ge=0, le=1e6), AfterValidator(_not_tiny)]
Tokens = Annotated[Count | None, BeforeValidator(_tokens, json_schema_input_type=int | str | None)]
TokenCount = Annotated[Count, BeforeValidator(_tokens, json_schema_input_type=int | str)]
Layers = Annotated[str, BeforeValidator(_layers, json_schema_input_type=int | str | list[int | str])]
Window = Annotated[int | str | None, BeforeValidator(_window, json_schema_input_type=int | str | None)]
LayersAgain = Annotated[
    Literal["auto"] | bool | int, BeforeValidator(_layers_again, json_schema_input_type=Literal["auto"] | bool | Count)
]
Part = Literal["new", "mixer", "lora", "all"]
TransferPart = Literal["new", "lora"]
Parts = Annotated[
    Listed[Part], AfterValidator(_distinct), BeforeValidator(as_list, json_schema_input_type=Part | list[Part])
]
TransferParts = Annotated[
    Listed[TransferPart],
    AfterValidator(_distinct),
    BeforeValidator(as_list, json_schema_input_type=TransferPart | list[TransferPart]),
]


class Strict(BaseModel):
    """Refuses unknown keys and coercions: "8" is no number, 1 is no boolean."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
