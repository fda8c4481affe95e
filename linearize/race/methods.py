"""The contestants of `linearize race`: what each method changes in the common recipe.

The common recipe has the layer, the text, the blocks, and two stages, `attention_transfer` and `logit_kl`. A method
returns `Part`s: conversions with their stages, one after the other. Every optimizer step of every method reads as many
tokens, so equal steps are equal tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..recipe.recipe import Recipe

Values = dict[str, Any]

ROUNDS = 3  # of progressive conversion, where there are layers for so many
FEWEST = 2 * ROUNDS  # optimizer steps: one for each stage of the method that has most
SHARE = "auto:25%"  # of the layers keep softmax in a hybrid, unless the common recipe says which
WINDOW = 64  # last tokens that LoLCATs' layer sees exactly
RADLADS = (100, 500, 100)  # millions of tokens of its three steps
LONGER = (8, 4, 2)  # times the length of blocks in its third step; radlads-style has 4,096 after 512
ADAM: Values = {"weight_decay": 0.0, "betas": [0.9, 0.999], "max_grad_norm": 1.0}  # LoLCATs'
NEW: Values = {"train": ["new"], "lora": None}  # the mechanism's own parameters alone


@dataclass(frozen=True)
class Common:
    """What all contestants share: the recipe, optimizer steps, and of the source its softmax layers, the linear layers
    that LoRA trains, and the most tokens that it reads."""

    recipe: Recipe
    steps: int
    layers: tuple[int, ...]
    targets: tuple[str, ...]
    longest: int | None

    @property
    def convert(self) -> Values:
        """The conversion with softmax in no layer."""
        return {**self.recipe.resolved()["convert"], "keep_softmax": "", "keep_heads": "", "kept_window": None}

    def stage(self, steps: int, first: bool, **changes: Any) -> Values:
        """The first or the second stage of the recipe for so many steps, with the second one's text and batch."""
        transfer, distil = self.recipe.resolved()["stages"]
        shared = {"batch": distil["batch"], "data": distil["data"], "tokens": None, "epochs": None, "steps": steps}
        return {**(transfer if first else distil), **shared, **changes}

    def two(self, steps: int) -> list[Values]:
        """Both stages, in the shares of their tokens."""
        first, second = divided(steps, self.shares)
        return [self.stage(first, True), self.stage(second, False)]

    @property
    def shares(self) -> tuple[int, int]:
        """Tokens of the recipe's two stages."""
        first, second = (budget(self.recipe, place) for place in (0, 1))
        return first, second


class Part(NamedTuple):
    """One run: what it converts and trains, and `whole`, the conversion of the original that has the same layers."""

    convert: Values
    stages: list[Values]
    whole: Values


@dataclass(frozen=True)
class Method:
    """A contestant. `about` says what it does, `source` where it was published, `differs` what stands in here for what
    linearize cannot repeat."""

    name: str
    about: str
    source: str
    differs: str
    parts: Callable[[Common], list[Part]]


def budget(recipe: Recipe, place: int) -> int:
    """Tokens of a stage that has a budget in tokens or in steps."""
    stage = recipe.stages[place]
    return stage.tokens or (stage.steps or 0) * per_step(recipe, place)


def per_step(recipe: Recipe, place: int) -> int:
    """Tokens of one optimizer step of a stage, in one process."""
    stage = recipe.stages[place]
    return stage.batch.blocks * recipe.data_for(stage).pack.seq_len


def divided(steps: int, shares: Sequence[float]) -> list[int]:
    """Whole steps in these shares: one at least of each, and `steps` in all, which are as many as shares or more."""
    due = [steps * share / sum(shares) for share in shares]
    found = [max(1, math.floor(one)) for one in due]
    places = range(len(shares))
    while sum(found) < steps:
        found[max(places, key=lambda n: due[n] - found[n])] += 1
    while sum(found) > steps:
        found[max(places, key=lambda n: found[n])] -= 1
    return found


def one_part(convert: Values, stages: list[Values]) -> list[Part]:
    """A method that converts once."""
    return [Part(convert, stages, convert)]


def lolcats(common: Common) -> list[Part]:
    """Its layer, its losses and its learning rates; each step half of the tokens."""
    near = (common.recipe.convert.options if common.recipe.convert else {}).get("window") or WINDOW
    options = {"feature_map": "hedgehog", "slope": 0.99, "window": near}
    constant = {"name": "constant", "warmup_ratio": 0.0, "warmup_steps": None, "min_lr_ratio": None}
    first, second = divided(common.steps, (1, 1))
    # The paper averages the error over layers, and linearize adds them up.
    error = {"error": "mse", "weight": 1000 / len(common.layers)}
    transfer = common.stage(first, True, loss=error, schedule=constant, optimizer={"lr": 1e-2, **ADAM}, **NEW)
    text = on_text(
        common,
        second,
        train=["lora"],
        lora={"r": 8, "alpha": 16.0, "target_modules": list(common.targets)},
        schedule=constant,
        optimizer={"lr": 1e-4, **ADAM},
    )
    return one_part({**common.convert, "mechanism": "la", "options": options}, [transfer, text])


def on_text(common: Common, steps: int, **changes: Any) -> Values:
    """A stage of cross entropy on the text, otherwise as the recipe's second one."""
    stage = {**common.stage(steps, False), "kind": "sft", "name": "sft", **changes}
    return {key: value for key, value in stage.items() if key not in ("loss", "completion_only")}


def three_steps(common: Common) -> list[Values]:
    """RADLADS' stages: alignment, logit KL, and text of a longer context with as many tokens a step."""
    align, distil, extend = divided(common.steps, RADLADS)
    loss = {"kl": 1.0, "ce": 0.0, "temperature": 1.0, "chunk_size": None}
    second = common.recipe.stages[1]
    length, batch = common.recipe.data_for(second).pack.seq_len, second.batch
    for times in LONGER:
        if batch.blocks % times == 0 and (common.longest is None or times * length <= common.longest):
            rows = batch.per_device // times if batch.per_device % times == 0 else 1
            batch_then = {"per_device": rows, "gradient_accumulation_steps": batch.blocks // times // rows}
            data = second.data.model_dump(mode="json")
            longer = {"batch": batch_then, "data": {**data, "pack": {**data["pack"], "seq_len": times * length}}}
            break
    else:
        longer = {}
    return [
        common.stage(align, True, name="align", **NEW),
        common.stage(distil, False, name="distil", train=["all"], lora=None, loss=loss),
        on_text(common, extend, name="extend", train=["all"], lora=None, **longer),
    ]


def radlads(common: Common) -> list[Part]:
    """Its three steps with the common layer."""
    return one_part(common.convert, three_steps(common))


def kept(common: Common) -> Values:
    """The conversion of a hybrid: the recipe's own layers or heads keep softmax, else a share of layers that linearize
    chooses."""
    convert: Values = common.recipe.resolved()["convert"]
    return convert if convert["keep_heads"] else {**convert, "keep_softmax": convert["keep_softmax"] or SHARE}


def kl_guided(common: Common) -> list[Part]:
    """Chosen layers keep softmax, the others learn by the three steps."""
    return one_part(kept(common), three_steps(common))


def progressive(common: Common) -> list[Part]:
    """Every second softmax layer, every second one of what is left, and at last the rest; each with both stages."""
    left, groups = list(common.layers), list[list[int]]()
    while len(groups) < ROUNDS - 1 and len(left) > 1:
        groups.append(left[::2])
        left = left[1::2]
    groups.append(left)
    parts, turned = [], list[int]()
    for group, steps in zip(groups, divided(common.steps, [1] * len(groups)), strict=True):
        turned += group
        convert = {**common.convert, "layers": listed(group)}
        parts.append(Part(convert, common.two(steps), {**convert, "layers": listed(turned)}))
    return parts


def listed(layers: Sequence[int]) -> str:
    """Layers as recipes have them."""
    return ",".join(map(str, sorted(layers)))


def hybrid(common: Common) -> list[Part]:
    """The recipe's two stages, with softmax in chosen layers."""
    return one_part(kept(common), common.two(common.steps))


def linear(common: Common) -> list[Part]:
    """The recipe's two stages, with softmax in no layer."""
    return one_part(common.convert, common.two(common.steps))


METHODS = {
    one.name: one
    for one in (
        Method(
            "lolcats",
            "linear attention with learned features beside an exact window learns softmax's outputs, half of the "
            "tokens; then LoRA learns the text by cross entropy",
            "LoLCATs, arXiv 2410.10254",
            "The layer is la with Hedgehog's features, which sees the tokens of the window too. Learning rates are the "
            "published ones, 1e-2 and 1e-4, and do not fall; the paper lowers them on a plateau. The last weights "
            "are kept. The text is the race's, not Alpaca.",
            lolcats,
        ),
        Method(
            "radlads",
            "alignment of hidden states, then logit KL with all weights, then cross entropy on longer text, in the "
            "paper's shares of 1 to 5 to 1",
            "RADLADS, arXiv 2505.03005",
            "The common layer stands in for the paper's variants of RWKV. attention_transfer stands in for the "
            "alignment: new parameters alone learn each head's softmax, where the paper trains the whole attention "
            "towards its output. Learning rates are the race's; the published ones (1e-3, then 1e-5) are for 100 "
            "million tokens and more.",
            radlads,
        ),
        Method(
            "kl-guided",
            "softmax stays in the layers that lower the KL most when they get it back; the others learn by the three "
            "steps of RADLADS",
            "KL-guided layer selection, arXiv 2512.20569",
            "Layers are chosen as convert.score_by says. Its default, restore, gives softmax back to one layer after "
            "the other, as the paper does, but mixers have learned by attention transfer alone and are not distilled "
            "again for each candidate, and lists to repeat count as much as text. The tokens of the choice are not "
            "counted. "
            "Otherwise as radlads; the paper's layers are Gated DeltaNet and GLA.",
            kl_guided,
        ),
        Method(
            "progressive",
            "every second softmax layer becomes linear and is trained, then every second one that is left, then the "
            "rest; the original is the teacher of logits throughout",
            "stepwise replacement, as in The Mamba in the Llama, arXiv 2408.15237",
            "The layer and the stages are the race's, the paper has Mamba and trains on chats. From the second round "
            "on, attention_transfer compares with softmax on weights that the rounds before have trained. Each round "
            "reads the text in an order of its own.",
            progressive,
        ),
        Method(
            "hybrid",
            "ours, as the preset hybrid: softmax stays in chosen layers; the others learn softmax's outputs, then the "
            "whole model the teacher's distribution, by KL alone",
            "linearize",
            "Learning rates and sizes are the race's. The tokens of the choice of layers are not counted.",
            hybrid,
        ),
        Method(
            "linear",
            "ours, as the preset gsa-window: every layer is linear beside an exact window; stages as in hybrid",
            "linearize",
            "Learning rates and sizes are the race's.",
            linear,
        ),
    )
}
