"""Recipes whose data are latents: what `linearize finetune` does with a pipeline of diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from ..recipe.models import Batch, Checkpoint, Convert, Optimizer, RunRecipe, Schedule
from ..recipe.presets import recipe_path, recipes_folder
from ..recipe.recipe import Recipe, load_recipe, validated
from ..recipe.types import Count, Listed, Ratio, Strict, Text
from ..recipe.yaml import Document


class Latents(Strict):
    latents: Text
    """A folder of latents (.safetensors, .pt, .npy), one or several in a file, or of images (.png, .jpg, .jpeg, .webp),
    which the pipeline's VAE encodes; relative paths start at the recipe's folder."""
    prompts: Text | None = None
    """A folder with a file of the same stem for each of them: embeddings of the prompt, [tokens,channels] for each
    latent, or the number of its class for DiT."""
    size: Count | None = None
    """Side in pixels to which images are cut and resized; null: they have one size."""


class DiffusionData(Strict):
    train: Latents
    """What is trained on."""
    eval: Latents | None = None
    """What predictions are compared on; null: the data of training."""


class DiffusionModel(Strict):
    base: Text
    """Folder of a pipeline of diffusers, or of one transformer."""
    trust_remote_code: bool = False
    """Allow Python code that the folder holds to run."""


class DiffusionStage(Strict):
    kind: Literal["attention_transfer", "prediction"]
    """attention_transfer: each mixer learns what its attention module put out; prediction: the model learns what its
    teacher predicts for noised latents."""
    name: Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_-]*$")] = Field(default_factory=lambda data: data["kind"])
    """For --stage and overrides; the kind unless given."""
    train: Literal["new", "all"] = "new"
    """Parameters that learn: new (the mechanism's own) or all, beside a copy of the teacher."""
    optimizer: Optimizer
    """How parameters follow their gradients."""
    schedule: Schedule = Schedule()
    """How the learning rate changes over the stage."""
    batch: Batch = Batch()
    """Latents of an optimizer step."""
    steps: Count
    """Optimizer steps."""

    @field_validator("train")
    @classmethod
    def _own_input(cls, train: str, info: ValidationInfo) -> str:
        if train == "all" and info.data.get("kind") == "attention_transfer":
            raise ValueError("must be new: a transfer gives each mixer the input that the teacher's module has")
        return train

    @field_validator("optimizer")
    @classmethod
    def _full(cls, optimizer: Optimizer) -> Optimizer:
        if optimizer.memory != "full":
            raise ValueError("memory must be full: models of diffusers train in float32")
        return optimizer


class DiffusionRuntime(Strict):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a CUDA device where torch sees one, else the CPU."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the arithmetic; auto: bf16 on a GPU, fp32 on a CPU. Weights are float32."""


class DiffusionEval(Strict):
    levels: Annotated[tuple[Ratio, ...], Field(strict=False, min_length=1)] = (0.1, 0.3, 0.5, 0.7, 0.9)
    """Noise levels at which predictions are compared: 0 is the latents alone, 1 noise alone."""
    samples: Count = 4
    """Samples of student and teacher in the picture."""
    sampling_steps: Count = 20
    """Steps of denoising of a sample."""
    max_latents: Count = 64
    """Latents that predictions are compared on at most."""


class DiffusionFinish(Strict):
    verify: bool = True
    """Load the finished pipeline in a clean process and check it."""
    push: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """user/repo on the Hub that receives the finished model."""


class DiffusionRecipe(RunRecipe):
    """What `linearize finetune` does with a pipeline of diffusers: base, surgery, latents and stages."""

    model: DiffusionModel
    """What is distilled."""
    convert: Convert | None = None
    """The conversion; null when the base is converted already."""
    noise: Literal["auto", "flow", "epsilon"] = "auto"
    """How latents are noised: flow matching, or the schedule of a model that predicts epsilon; auto: as the pipeline's
    scheduler says."""
    data: DiffusionData
    """Latents and prompts."""
    stages: Listed[DiffusionStage]
    """What is trained, in this order."""
    runtime: DiffusionRuntime = DiffusionRuntime()
    """Device and precision."""
    checkpoint: Checkpoint = Checkpoint(save_total_limit=1)
    """How often the run is saved."""
    eval: DiffusionEval = DiffusionEval()
    """How student and teacher are compared at the end."""
    finish: DiffusionFinish = DiffusionFinish()
    """What happens to the finished model."""

    def shortened(self, steps: int) -> DiffusionRecipe:
        """The recipe with so many steps at most in each stage."""
        stages = tuple(one.model_copy(update={"steps": min(steps, one.steps)}) for one in self.stages)
        return self.model_copy(update={"stages": stages})


def holds_latents(recipe: str | Path, overrides: Sequence[str] = ()) -> bool:
    """Whether a recipe trains on latents, and so a model of diffusers."""
    data = Document(recipe_path(recipe), overrides).data.get("data")
    train = data.get("train") if isinstance(data, dict) else None
    return isinstance(train, dict) and "latents" in train


def load_either(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe | DiffusionRecipe:
    """A recipe for models of transformers, or of latents, as its data say. Raises LinearizeError as `load_recipe`."""
    return (load_latents_recipe if holds_latents(recipe, overrides) else load_recipe)(recipe, overrides)


def load_latents_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> DiffusionRecipe:
    """`load_recipe` for a recipe of latents. Raises LinearizeError with a line per mistake."""
    path = recipe_path(recipe)
    loaded: DiffusionRecipe = validated(Document(path, overrides), path.parent, DiffusionRecipe)
    loaded._folder = Path() if path.parent == recipes_folder() else path.parent
    return loaded
