"""The schema of recipes: frozen pydantic models with every default. Every key has an effect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from ..plan.keep import Method
from ..train.terms import TERMS
from .data import OF_IMAGES, Data, Pack, StageData, holds_images
from .renamed import present_keys
from .types import (
    Count,
    Decay,
    Factor,
    Layers,
    LayersAgain,
    Listed,
    Names,
    OptionalFactor,
    ParentError,
    Parts,
    Positive,
    Rate,
    Ratio,
    Strict,
    Temperature,
    Text,
    TokenCount,
    Tokens,
    TransferParts,
    Weight,
    Window,
)
from .yaml import shown

# What tells the two kinds of `model.base` apart in pydantic's paths.
NAMED, RANDOM = "a model's name", "a random model"


class Scratch(Strict):
    """A model with random weights, of any architecture and size."""

    config: Text | dict[str, Any]
    """A folder or Hub repository whose architecture and size it takes, or a mapping: `model_type` and what differs from
    that type's defaults."""
    tokenizer: Text | None = None
    """The tokenizer of a text model: a folder, a Hub repository or `demo`; null: that of `config`, if it names one."""
    processor: Text | None = None
    """The image processor of an image model: a folder or Hub repository; null: that of `config`, if it names one, else
    none, for arrays of pixel values."""


class Model(Strict):
    base: Annotated[
        Annotated[Text, Tag(NAMED)] | Annotated[Scratch, Tag(RANDOM)],
        Discriminator(lambda value: RANDOM if isinstance(value, dict | Scratch) else NAMED),
    ]
    """A folder, a GGUF file, a Hub repository, `demo`, the model that the tool ships, or `{config: ...}` for random
    weights."""
    revision: Text | None = None
    """Branch, tag or commit of a Hub repository; null: its main branch."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the weights; null keeps the stored one."""
    trust_remote_code: bool = False
    """Allow Python code that the base's repository holds to run."""


class Teacher(Strict):
    """A model other than the source, with its tokenizer, whose predictions `logit_kl` learns."""

    model: Text
    """A folder, a GGUF file, a Hub repository or `demo`."""
    revision: Text | None = None
    """Branch, tag or commit of a Hub repository; null: its main branch."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of its weights; null keeps the stored one."""
    trust_remote_code: bool = False
    """Allow Python code that the teacher's repository holds to run."""


class Convert(Strict):
    mechanism: Text
    """What replaces softmax; `linearize mechanisms` lists them."""
    options: dict[str, Any] = {}
    """The mechanism's own; see `linearize mechanisms NAME`. `rows@0-3: 7` is for layers 0 to 3 alone."""
    layers: Layers = "all"
    """Layers to convert, by number from 0: "0-3,7", [0, 2], "every:2" or "all"."""
    keep_softmax: Layers = ""
    """Layers left as they are, such as "7,15", [7, 15] or every:4; auto:2 or auto:25% lets linearize choose."""
    keep_heads: str = ""
    """Heads of converted layers that keep softmax, by layer and KV head: "3:0,1;7:2"; or auto:4, auto:2%."""
    kept_window: Window = None
    """Layers that keep softmax see only the last tokens, for example 4096, and the first four. 4096@1,3: these layers
    alone; auto:4096: the layers where the run measures that this changes predictions by at most 0.01 nats a token
    (auto:4096:0.02: another limit); null: they see all tokens."""
    score_by: Method = "restore"
    """How auto compares layers, or heads, on the text of the first stage."""
    allow_drop: Names = ()
    """What the result may lack, as a refused plan names it: "alibi" or [alibi, sinks]."""
    copy_weights: bool = False
    """Copy the source's shards; else they are hard links to them where possible."""


class Optimizer(Strict):
    """AdamW; `max_grad_norm` bounds the norm of the gradient."""

    lr: Rate
    """Learning rate at its peak: AdamW's step size."""
    new_lr: Rate | None = None
    """Learning rate of the mechanism's new parameters; null: lr."""
    weight_decay: Weight = 0.0
    """Decoupled decay: the share of a weight that a step of lr 1 would take away."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Decay of the gradient's mean and of its mean square, each the share that a step keeps."""
    max_grad_norm: Annotated[float, Field(ge=1e-6)] = 1.0
    """Largest L2 norm of the gradient over all trained parameters; larger ones are scaled down to it."""
    memory: Literal["full", "small", "auto"] = "full"
    """full: weights that train, gradients and moments in float32; small: source weights and their gradients stay in
    the model's dtype, moments take 8 bits; auto: small where full does not fit the device."""

    @field_validator("weight_decay")
    @classmethod
    def _keeps_weights(cls, decay: float, info: ValidationInfo) -> float:
        rate = max(info.data.get("lr", 0), info.data.get("new_lr") or 0)
        if decay * rate >= 1:
            raise ValueError(
                f"must be < {1 / rate:g}, not {shown(decay)}: at lr {rate:g} a step takes away all of a weight"
            )
        return decay


class Schedule(Strict):
    name: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = "constant"
    """How the learning rate changes after the warm-up."""
    warmup_ratio: Ratio = 0.0
    """Share of the stage's steps in which the rate rises from 0; `warmup_steps` counts them instead."""
    warmup_steps: Count | None = None
    """Optimizer steps in which the rate rises from 0; null: warmup_ratio."""
    min_lr_ratio: Ratio | None = Field(default=None, validate_default=True)
    """Lowest learning rate as a share of the peak; given with cosine_with_min_lr, and only then."""

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
    """Blocks of text, or images, in one pass on one device."""
    gradient_accumulation_steps: Count = 1
    """Passes whose gradients add up to one optimizer step."""

    @property
    def blocks(self) -> int:
        """Blocks of one process in one optimizer step."""
        return self.per_device * self.gradient_accumulation_steps


class Lora(Strict):
    r: Count
    """Rank: columns of the added matrices."""
    alpha: Factor
    """The added product is multiplied by the factor alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is set to zero in training."""
    target_modules: Listed[Text] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Last names of the linear layers that get adapters."""


class Stage(Strict):
    """What every kind of stage has; exactly one of tokens, steps and epochs is its budget."""

    kind: str
    """What the stage learns from."""
    name: Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_-]*$")] = Field(default_factory=lambda data: data["kind"])
    """Name for --stage and overrides; the kind unless given."""
    train: Parts
    """Parameters that learn: new (the mechanism's own), mixer (the attention modules whole), lora, or all."""
    lora: Lora | None = Field(default=None, validate_default=True)
    """Given when `train` has lora, and only then."""
    optimizer: Optimizer
    """The optimizer's settings."""
    schedule: Schedule = Schedule()
    """How the learning rate changes over the stage."""
    batch: Batch = Batch()
    """How much text, or how many images, an optimizer step sees."""
    data: StageData = StageData()
    """The stage's own data, where it is not the recipe's."""
    tokens: Tokens = None
    """Budget in tokens (images count as one each): a number, or 20M, 1.5B, 300k."""
    steps: Count | None = None
    """Budget in optimizer steps."""
    epochs: Positive | None = Field(default=None, validate_default=True)
    """Budget in passes over the training data."""

    @property
    def weights(self) -> dict[str, float]:
        """Factors of the terms (train/terms.py) that its loss adds up, by name; none where it is another loss."""
        given = {name: self.of_loss(name, 0.0) for name in TERMS}
        return {name: weight for name, weight in given.items() if weight > 0}

    def of_loss(self, key: str, default: Any) -> Any:
        """A key of the stage's `loss`, where that has it."""
        return getattr(getattr(self, "loss", None), key, default)

    @property
    def temperature(self) -> float:
        """Divides the logits of both before a divergence."""
        return self.of_loss("temperature", 1.0)

    @property
    def pooling(self) -> Literal["mean", "first"]:
        """How one vector is made of a row's last hidden states."""
        return self.of_loss("pooling", "mean")

    @property
    def chunk_size(self) -> int | None:
        """Tokens of each row whose logits are computed at a time; None: all."""
        return self.of_loss("chunk_size", None)

    @property
    def label_smoothing(self) -> float:
        """The share of each target that all classes or tokens get alike."""
        return getattr(self, "smoothing", 0.0)

    @property
    def learns_logits(self) -> bool:
        """Whether it asks its teacher for logits."""
        return any(TERMS[name].teacher == "logits" for name in self.weights)

    @property
    def asks_teacher(self) -> bool:
        """Whether a term of its loss compares with what a teacher computes."""
        return any(TERMS[name].teacher for name in self.weights)

    @property
    def learns_labels(self) -> bool:
        """Whether a term of its loss is of the data alone."""
        return any(TERMS[name].teacher is None for name in self.weights)

    @property
    def completions_alone(self) -> bool:
        """Whether it learns its teacher's predictions of answers alone."""
        return getattr(self, "completion_only", False)

    @property
    def answers_alone(self) -> bool:
        """Whether only answers are targets, in rows that have them."""
        return self.kind == "sft" or self.completions_alone

    @property
    def loss_name(self) -> str:
        """What the number of each step is called: only numbers of one name can be compared."""
        return "attention error" if self.kind == "attention_transfer" else "loss"

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
    weight: Factor = 1.0
    """Factor of each layer's error. Gradients of layers add up; the loss that is logged is their mean."""


class AttentionTransfer(Stage):
    """Per layer: the mixer's output per head against softmax's, on the teacher's hidden states."""

    kind: Literal["attention_transfer"]
    """Each mixer learns its own layer's softmax."""
    train: TransferParts
    """Parameters that learn: new (the mechanism's own) or lora."""
    loss: TransferLoss = TransferLoss()
    """How a layer's error is measured."""


# The terms that a recipe may weigh, each a key with its factor: those of features, and the others.
OF_FEATURES = [name for name, one in TERMS.items() if one.teacher == "features"]
WEIGHED = [name for name in TERMS if name not in OF_FEATURES]


class Made(Strict, use_attribute_docstrings=False):
    """Classes that are made here have no source, and pydantic would look for it in all modules for seconds."""


if TYPE_CHECKING:
    TermWeights = Strict
    FeatureWeights = Strict
else:
    TermWeights, FeatureWeights = (
        create_model(
            title,
            __base__=Made,
            **{name: (OptionalFactor, Field(TERMS[name].weight, description=TERMS[name].about)) for name in names},
        )
        for title, names in (("TermWeights", WEIGHED), ("FeatureWeights", OF_FEATURES))
    )


def check_weights(given: dict[str, Any], names: list[str]) -> None:
    """Refuse a loss whose terms are all 0."""
    if all(given.get(name) == 0 for name in names):
        raise ParentError(f"{' and '.join(names)} are all 0: nothing to learn from")


class LogitLoss(TermWeights, use_attribute_docstrings=True):
    temperature: Temperature = 1.0
    """Divides the logits of both before the divergence."""
    chunk_size: Count | None = Field(default=None, validate_default=True)
    """Tokens of each row whose logits are computed at a time, for long rows and large vocabularies; null: all."""

    @field_validator("chunk_size")
    @classmethod
    def _not_nothing(cls, size: int | None, info: ValidationInfo) -> int | None:
        check_weights(info.data, WEIGHED)
        return size


class LogitKL(Stage):
    """Kullback-Leibler divergence from the teacher's distribution over tokens or classes, plus cross entropy. Where a
    model predicts numbers of images, such as a depth: the squared error relative to the square of the teacher's."""

    kind: Literal["logit_kl"]
    """The model learns its teacher's predictions."""
    loss: LogitLoss = LogitLoss()
    """What the loss adds up."""
    completion_only: bool = False
    """Learn the tokens of answers alone: the assistant's of `messages`, or those of `completion`; all of plain text."""


class FeatureLoss(FeatureWeights, use_attribute_docstrings=True):
    pooling: Literal["mean", "first"] = Field(default="mean", validate_default=True)
    """How one vector is made of a row's last hidden states, for `embedding` and `similarity`: their mean, or the first
    one, a class token."""

    @field_validator("pooling")
    @classmethod
    def _not_nothing(cls, pooling: str, info: ValidationInfo) -> str:
        check_weights(info.data, OF_FEATURES)
        return pooling


class FeatureCosine(Stage):
    """Last hidden states against the teacher's, for models without a head: one minus their cosine, and for sentence
    encoders one minus that of each row's vector, and how similar two rows are."""

    kind: Literal["feature_cosine"]
    """The model learns its teacher's last hidden states."""
    loss: FeatureLoss = FeatureLoss()
    """What the loss adds up."""


class SFT(Stage):
    """Cross entropy: on the classes of images, on the hidden tokens of masked text, on all tokens of packed text, or on
    the assistant's tokens of `messages` or prompt + completion."""

    kind: Literal["sft"]
    """The model learns from the data alone, without a teacher."""
    smoothing: Ratio = 0.0
    """Label smoothing: the share of each target that all classes or tokens get alike."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Stochastic depth: the chance that a sample goes past the last layer; it falls evenly to 0 at the first."""

    @property
    def weights(self) -> dict[str, float]:
        return {"ce": 1.0}


AnyStage = Annotated[AttentionTransfer | LogitKL | FeatureCosine | SFT, Field(discriminator="kind")]


class Runtime(Strict):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a CUDA device where torch sees one, else the CPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of the arithmetic; auto: bf16 on a GPU, fp32 on a CPU. Trained weights and states stay in fp32."""
    gradient_checkpointing: LayersAgain = False
    """Compute activations again in the backward pass: less memory, more time. A number: in so many layers, from the
    first on; auto: in as many as the device is too small for."""
    offload_activations: bool = False
    """Keep in the host's memory what gradient_checkpointing stores, for rows of many tokens."""
    graphs: Literal["auto", True, False] = "auto"
    """Micro batches of packed text as one CUDA graph each, for GPUs that wait for Python; auto: where it is faster."""
    compile: Literal["auto", True, False] = "auto"
    """torch.compile of each layer in the stages behind attention transfer: a minute at the start, then more tokens/s;
    auto: where each process holds whole weights, and a stage of text is long enough to win that minute back."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes that read and prepare samples ahead, such as images; 0: the training process does it."""
    batch: Literal["given", "auto"] = "given"
    """auto: on a GPU per_device becomes the most that fits, with fewer passes; a step keeps its number of blocks."""

    @field_validator("offload_activations")
    @classmethod
    def _little_to_move(cls, offload: bool, info: ValidationInfo) -> bool:
        again = info.data.get("gradient_checkpointing")
        if offload and again != "auto" and again is not True:
            raise ValueError("needs gradient_checkpointing: true, or all activations of all layers would move")
        return offload


class Checkpoint(Strict):
    every_steps: Count = 200
    """Optimizer steps between checkpoints."""
    save_total_limit: Count = 2
    """Newest checkpoints of a stage that stay on the disk."""


class Eval(Strict):
    every_steps: Count | None = None
    """Optimizer steps between evaluations; null: only at the end of each stage."""
    patience: Count | None = None
    """A stage ends early after so many evaluations in a row without a lower KL, or relative error; null: never."""
    max_tokens: TokenCount = 65536
    """Held-out tokens (images count as one each) that an evaluation reads at most."""


class Track(Strict):
    to: Literal["none", "tensorboard", "wandb", "trackio", "mlflow"] = "none"
    """Where metrics go in addition to metrics.jsonl; its package must be installed."""


class Finish(Strict):
    keep: Literal["last", "best"] = "last"
    """best: the weights with the lowest held-out KL among the last stage's evaluations (eval.every_steps), or with the
    lowest relative error where a model predicts numbers of images, or has no head."""
    merge_lora: bool = True
    """false: LoRA stays apart from the weights, in final/adapter, for PeftModel.from_pretrained of peft. eval and
    generate put it on; export and serve refuse the folder."""
    verify: bool = True
    """Load the converted and the finished model in clean processes, and compare the latter's logits. false: neither;
    `linearize verify` does it later."""
    push: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """user/repo on the Hub that receives the finished model."""


class RunRecipe(Strict):
    """What recipes of transformers' models and of pipelines share."""

    version: Literal[1]
    """Version of the format of recipes."""
    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the run; every ${name} in the recipe becomes this."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of new parameters, the order of the data, and dropout or noise."""
    output_dir: Text = Field(default_factory=lambda data: f"runs/{data['name']}")
    """runs/${name} unless given."""

    _folder: Path = PrivateAttr(default=Path())

    @model_validator(mode="before")
    @classmethod
    def _present_keys(cls, data: Any) -> Any:
        return present_keys(data)

    @property
    def folder(self) -> Path:
        """Where relative data files start."""
        return self._folder

    def resolved(self) -> dict[str, Any]:
        """Every value, defaults included, as JSON has it; `model_validate` reads it back."""
        return self.model_dump(mode="json")


class Recipe(RunRecipe):
    """What `linearize finetune` does: base, surgery, data and the stages of distillation."""

    model: Model
    """What is distilled, and from what."""
    convert: Convert | None = None
    """The conversion; null when the base is converted already, and for a random one that keeps its softmax."""
    teacher: Annotated[
        Teacher | None,
        BeforeValidator(
            lambda value: {"model": value} if isinstance(value, str) else value,
            json_schema_input_type=str | Teacher | None,
        ),
    ] = None
    """Another teacher of logits, as a name or with its keys; null: the base with softmax."""
    data: Data
    """Text or images of all stages that have none of their own."""
    stages: Listed[AnyStage]
    """What is trained on what, in this order."""
    runtime: Runtime = Runtime()
    """Devices and precision."""
    checkpoint: Checkpoint = Checkpoint()
    """How often the run is saved."""
    eval: Eval = Eval()
    """How often and on how much it is evaluated."""
    track: Track = Track()
    """Where metrics are shown."""
    finish: Finish = Finish()
    """What happens to the finished model."""

    @field_validator("eval")
    @classmethod
    def _has_text(cls, value: Eval, info: ValidationInfo) -> Eval:
        data, stages = info.data.get("data"), info.data.get("stages")
        if value.every_steps and data and stages and not any(own.eval for own in (data, *(s.data for s in stages))):
            raise ValueError("every_steps is set, but data.eval is not")
        if value.patience and not value.every_steps:
            raise ValueError("patience is set, but every_steps is not")
        return value

    @field_validator("finish")
    @classmethod
    def _has_scores(cls, value: Finish, info: ValidationInfo) -> Finish:
        evaluation = info.data.get("eval")
        if value.keep == "best" and evaluation and not evaluation.every_steps:
            raise ValueError("keep is best, but eval.every_steps is not set")
        return value

    @property
    def plain(self) -> bool:
        """Whether it trains a random model as it is: the softmax twin of one that is converted."""
        return self.convert is None and isinstance(self.model.base, Scratch)

    @property
    def keeps_adapter(self) -> bool:
        """Whether the finished model's LoRA lies apart from it."""
        return not self.finish.merge_lora and any(stage.lora for stage in self.stages)

    def sources_of(self, stage: Stage) -> dict[str, Any]:
        """What a stage reads, by the keys of the recipe that name it: its own, or those of all stages."""
        data, found = self.data_for(stage), dict[str, Any]()
        for split in ("train", "eval"):
            if (source := getattr(data, split)) is not None:
                own = f"stages[{self.stages.index(stage)}]." * (getattr(stage.data, split) is not None)
                found[f"{own}data.{split}"] = source
        return found

    def data_for(self, stage: Stage) -> Data:
        """The data of one of the stages: its own where given, else the recipe's."""
        own, shared = stage.data, self.data
        pack = Pack(**{key: getattr(own.pack, key) or getattr(shared.pack, key) for key in Pack.model_fields})
        train = own.train or shared.train
        changes: dict[str, Any] = {}
        if holds_images(train):
            changes = {key: getattr(shared, key) for key in OF_IMAGES}
        return Data(train=train, eval=own.eval or shared.eval, pack=pack, **changes)

    def changed(self, resolved: dict[str, Any]) -> Recipe:
        """The recipe of these values, with its files where this one's are."""
        other = Recipe.model_validate(resolved)
        other._folder = self._folder
        return other
