"""What a recipe may hold: frozen pydantic models with every default. A key is here only if it is honoured."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
    field_validator,
)

from .errors import did_you_mean
from .recipe_yaml import shown


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


def _parts(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("names a part twice")
    if "all" in names and len(names) > 1:
        raise ValueError("'all' already includes the others")
    return names


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _data_file(name: str) -> str:
    if not name.endswith((".txt", ".jsonl")):
        raise ValueError(f"must be a .txt or .jsonl file, not {shown(name)}")
    return name


T = TypeVar("T")
Listed = Annotated[tuple[T, ...], Field(strict=False, min_length=1)]  # strict would refuse YAML's lists
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(gt=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Tokens = Annotated[Count | None, BeforeValidator(_tokens, json_schema_input_type=int | str | None)]
Layers = Annotated[str, BeforeValidator(_layers, json_schema_input_type=int | str | list[int | str])]
Part = Literal["new", "mixer", "lora", "all"]
TransferPart = Literal["new", "lora"]


class Strict(BaseModel):
    """Refuses unknown keys and coercions: "8" is no number, 1 is no boolean."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Model(Strict):
    base: Text
    """A folder, a Hub repository, or `demo`, the model that the tool ships."""
    revision: Text | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; null keeps the stored one."""
    trust_remote_code: bool = False


class Convert(Strict):
    mechanism: Text
    options: dict[str, Any] = {}
    """The mechanism's own; see `linearize mechanisms NAME`."""
    layers: Layers = "all"
    keep_softmax: Layers = ""
    """Layers left as they are, such as "7,15" or [7, 15]."""


class FileSource(Strict):
    files: Listed[Annotated[str, AfterValidator(_data_file)]]
    """.txt or .jsonl; relative paths start at the recipe's folder."""


class DatasetSource(Strict):
    path: Text
    """A Hugging Face dataset."""
    name: Text | None = None
    split: Text = "train"
    streaming: bool = False


class DemoSource(Strict):
    demo: Literal["train", "heldout", "packages"]
    """The running Python's standard library, split, or the sources of the packages that linearize needs."""


SOURCES: dict[str, type[Strict]] = {"files": FileSource, "path": DatasetSource, "demo": DemoSource}


def _source_tag(value: Any) -> str | None:
    """The one key that tells the sources apart, or the nearest, so that its typo is what gets reported."""
    if not isinstance(value, dict):
        return next((tag for tag, source in SOURCES.items() if isinstance(value, source)), None)
    tags = [tag for tag in SOURCES if tag in value]
    tags = tags or [tag for tag in SOURCES if any(did_you_mean(key, [tag]) for key in value)]
    return tags[0] if len(tags) == 1 else None


Source = Annotated[
    Annotated[FileSource, Tag("files")] | Annotated[DatasetSource, Tag("path")] | Annotated[DemoSource, Tag("demo")],
    Discriminator(_source_tag, "rule", f"must be a mapping with exactly one of {', '.join(SOURCES)}"),
]


class Pack(Strict):
    seq_len: Count = 2048
    text_key: Text = "text"


class Data(Strict):
    train: Source
    eval: Source | None = None
    pack: Pack = Pack()


class StagePack(Strict):
    seq_len: Count | None = None
    text_key: Text | None = None


class StageData(Strict):
    """A stage's own data; null inherits the recipe's."""

    train: Source | None = None
    eval: Source | None = None
    pack: StagePack = StagePack()


class Optimizer(Strict):
    """AdamW; `clip` bounds the norm of the gradient."""

    lr: Positive
    weight_decay: Weight = 0.0
    betas: Annotated[tuple[Ratio, Ratio], Field(strict=False)] = (0.9, 0.95)
    clip: Positive = 1.0


class Schedule(Strict):
    name: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = "constant"
    warmup_ratio: Ratio = 0.0
    min_lr_ratio: Ratio | None = Field(default=None, validate_default=True)
    """The floor over the peak; given with cosine_with_min_lr, and only then."""

    @field_validator("min_lr_ratio")
    @classmethod
    def _iff_floor(cls, ratio: float | None, info: ValidationInfo) -> float | None:
        if "name" in info.data and (info.data["name"] == "cosine_with_min_lr") != (ratio is not None):
            raise ValueError("missing; cosine_with_min_lr needs it" if ratio is None else "is for cosine_with_min_lr")
        return ratio


class Batch(Strict):
    per_device: Count = 1
    accumulate: Count = 1


class Lora(Strict):
    r: Count
    alpha: Positive
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target: Listed[Text] = ("q_proj", "k_proj", "v_proj", "o_proj")


class Stage(Strict):
    """What every kind of stage has; exactly one of tokens, steps and epochs is its budget."""

    kind: str
    name: Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_-]*$")] = Field(default_factory=lambda data: data["kind"])
    """For --stage and overrides; the kind unless given."""
    train: Annotated[
        Listed[Part],
        AfterValidator(_parts),
        BeforeValidator(_as_list, json_schema_input_type=Part | list[Part]),
    ]
    lora: Lora | None = Field(default=None, validate_default=True)
    """Given when `train` has lora, and only then."""
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    batch: Batch = Batch()
    data: StageData = StageData()
    tokens: Tokens = None
    """A number, or 20M, 1.5B, 300k."""
    steps: Count | None = None
    epochs: Positive | None = Field(default=None, validate_default=True)

    @field_validator("lora")
    @classmethod
    def _iff_trained(cls, lora: Lora | None, info: ValidationInfo) -> Lora | None:
        if "train" in info.data and ("lora" in info.data["train"]) != (lora is not None):
            raise ValueError("missing; train has lora" if lora is None else "train does not have lora")
        return lora

    @field_validator("epochs")
    @classmethod
    def _one_budget(cls, epochs: float | None, info: ValidationInfo) -> float | None:
        budgets = {name: info.data.get(name) for name in ("tokens", "steps")} | {"epochs": epochs}
        given = [name for name, value in budgets.items() if value is not None]
        if {"tokens", "steps"} <= info.data.keys() and len(given) != 1:
            found = f", not {' and '.join(given)}" if given else ""
            raise ParentError(f"needs exactly one of {', '.join(budgets)}{found}")
        return epochs


class AttentionTransfer(Stage):
    """Per layer: the mixer's output per head against softmax's, on the teacher's hidden states."""

    kind: Literal["attention_transfer"]
    train: Annotated[
        Listed[TransferPart],
        AfterValidator(_parts),
        BeforeValidator(_as_list, json_schema_input_type=TransferPart | list[TransferPart]),
    ]


class LogitLoss(Strict):
    kl: Weight = 1.0
    ce: Weight = Field(default=0.0, validate_default=True)
    temperature: Positive = 1.0

    @field_validator("ce")
    @classmethod
    def _not_nothing(cls, ce: float, info: ValidationInfo) -> float:
        if ce == 0 and info.data.get("kl") == 0:
            raise ParentError("kl and ce are both 0: nothing to learn from")
        return ce


class LogitKL(Stage):
    """Kullback-Leibler divergence from the teacher's next-token distribution, plus cross entropy."""

    kind: Literal["logit_kl"]
    loss: LogitLoss = LogitLoss()


class SFT(Stage):
    """Cross entropy: on the assistant's tokens of `messages` or prompt + completion, or on all of a text."""

    kind: Literal["sft"]


class Runtime(Strict):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False


class Checkpoint(Strict):
    every_steps: Count = 200
    keep: Count = 2


class Eval(Strict):
    every_steps: Count | None = None
    max_tokens: Count = 65536


class Track(Strict):
    to: Literal["none", "tensorboard", "wandb"] = "none"


class Finish(Strict):
    merge_lora: bool = True
    verify: bool = True


class Recipe(Strict):
    """What `linearize finetune` does: base, surgery, data and the stages of distillation."""

    version: Literal[1]
    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the run; every ${name} in the recipe becomes this."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    output_dir: Text = Field(default_factory=lambda data: f"runs/{data['name']}")
    """runs/${name} unless given."""
    model: Model
    convert: Convert | None = None
    """null when the base is converted already."""
    data: Data
    stages: Listed[Annotated[AttentionTransfer | LogitKL | SFT, Field(discriminator="kind")]]
    runtime: Runtime = Runtime()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    track: Track = Track()
    finish: Finish = Finish()

    _folder: Path = PrivateAttr(default=Path())

    @field_validator("eval")
    @classmethod
    def _has_text(cls, value: Eval, info: ValidationInfo) -> Eval:
        data, stages = info.data.get("data"), info.data.get("stages")
        if value.every_steps and data and stages and not any(own.eval for own in (data, *(s.data for s in stages))):
            raise ValueError("every_steps is set, but data.eval is not")
        return value

    @property
    def folder(self) -> Path:
        """Where relative data files start."""
        return self._folder

    def data_for(self, stage: Stage) -> Data:
        """The data of one of the stages: its own where given, else the recipe's."""
        own, shared = stage.data, self.data
        pack = Pack(
            seq_len=own.pack.seq_len or shared.pack.seq_len,
            text_key=own.pack.text_key or shared.pack.text_key,
        )
        return Data(train=own.train or shared.train, eval=own.eval or shared.eval, pack=pack)

    def resolved(self) -> dict[str, Any]:
        """Every value, defaults included, as JSON has it; `Recipe.model_validate` reads it back."""
        return self.model_dump(mode="json")
