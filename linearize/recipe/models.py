"""The schema of recipes: frozen pydantic models with every default. Every key has an effect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator

from ..plan.keep import Method
from .data import Data, Pack, StageData
from .types import (
    Count,
    Layers,
    Listed,
    Names,
    ParentError,
    Parts,
    Positive,
    Ratio,
    Strict,
    Text,
    Tokens,
    TransferParts,
    Weight,
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
    """The mechanism's own; see `linearize mechanisms NAME`. `rows@0-3: 7` is for layers 0 to 3 alone."""
    layers: Layers = "all"
    keep_softmax: Layers = ""
    """Layers left as they are, such as "7,15", [7, 15] or every:4; auto:2 or auto:25% lets linearize choose."""
    score_by: Method = "restore"
    """How auto compares layers, on the text of the first stage."""
    allow_drop: Names = ()
    """What the result may lack, as a refused plan names it: "alibi" or [alibi, sinks]."""
    copy_weights: bool = False
    """Copy the source's shards; else they are hard links to them where possible."""


class Optimizer(Strict):
    """AdamW; `clip` bounds the norm of the gradient."""

    lr: Positive
    new_lr: Positive | None = None
    """Of the mechanism's new parameters; null: lr."""
    weight_decay: Weight = 0.0
    betas: Annotated[tuple[Ratio, Ratio], Field(strict=False)] = (0.9, 0.95)
    clip: Positive = 1.0


class Schedule(Strict):
    name: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = "constant"
    warmup_ratio: Ratio = 0.0
    """Of the stage's steps; `warmup_steps` counts them instead."""
    warmup_steps: Count | None = None
    min_lr_ratio: Ratio | None = Field(default=None, validate_default=True)
    """The floor over the peak; given with cosine_with_min_lr, and only then."""

    @field_validator("warmup_steps")
    @classmethod
    def _one_warmup(cls, steps: int | None, info: ValidationInfo) -> int | None:
        if steps is not None and info.data.get("warmup_ratio"):
            raise ParentError("needs at most one of warmup_ratio, warmup_steps")
        return steps

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
    train: Parts
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
            found = f", not {' and '.join(given)}: set the rest to null" if given else ""
            raise ParentError(f"needs exactly one of {', '.join(budgets)}{found}")
        return epochs


class TransferLoss(Strict):
    error: Literal["relative", "mse"] = "relative"
    """relative: squared error over the mean square of the layer's softmax output; mse: mean over heads and dims."""
    weight: Positive = 1.0
    """Factor of each layer's error. Gradients of layers add up; the loss that is logged is their mean."""


class AttentionTransfer(Stage):
    """Per layer: the mixer's output per head against softmax's, on the teacher's hidden states."""

    kind: Literal["attention_transfer"]
    train: TransferParts
    loss: TransferLoss = TransferLoss()


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
    """Kullback-Leibler divergence from the teacher's distribution over tokens or classes, plus cross entropy."""

    kind: Literal["logit_kl"]
    loss: LogitLoss = LogitLoss()


class FeatureCosine(Stage):
    """One minus the cosine of the last hidden states and the teacher's, for models without a head."""

    kind: Literal["feature_cosine"]


class SFT(Stage):
    """Cross entropy: on the classes of images, the hidden tokens of masked text; of packed text on all of it, or on
    the assistant's tokens of `messages` or prompt + completion."""

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
    """false: LoRA stays apart from the weights, in final/adapter, for PeftModel.from_pretrained of peft."""
    verify: bool = True
    push: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """user/repo on the Hub that receives the finished model."""


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
    stages: Listed[Annotated[AttentionTransfer | LogitKL | FeatureCosine | SFT, Field(discriminator="kind")]]
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
    def keeps_adapter(self) -> bool:
        """Whether the finished model's LoRA lies apart from it."""
        return not self.finish.merge_lora and any(stage.lora for stage in self.stages)

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
