"""Choose which layers, or heads, keep softmax: load the source, train its mixers a little, see what each is worth.

The choice is a value that the plan stores; carrying the plan out scores nothing again.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.code import SourceClasses
from ..checkpoint.source import Source
from ..convert import Pricer
from ..data.batches import Batch, Samples, by_length, collate, hidden_patches, is_numbers, open_processor
from ..data.documents import check_enough
from ..data.images import Images, Labelled, find_images
from ..data.kinds import has_head, kind_of
from ..data.packing import MaskedBlocks, TextSource, build_blocks
from ..errors import IncompatibleError, LinearizeError, reason_of
from ..measure.evaluate import check_finite, feature_error
from ..measure.generate import device_memory, load_tokenizer, watch_tokens
from ..measure.positions import figures, long_rows, longest_text, pair_sums
from ..measure.recall import Row, Writer
from ..plan.keep import LOCAL, LONGEST, NAMED, Choice, Method, WindowChoice, largest_kl, leaves_one, named
from ..plan.mechanisms import build_mixer
from ..plan.plan import Plan, Step, make_steps, mismatch
from ..probe.trace import quiet
from ..terminal.output import counted, layers_named, ranges
from ..terminal.progress import Advance, progress, silent
from ..train.losses import IGNORED, next_token_targets
from ..train.predictions import apart
from ..train.runtime import Say
from ..verify.child.inputs import most_tokens
from .methods import Chosen, Unit, any_fits, restore, swaps
from .mixture import Mixture, Units

# What is read: steps of attention transfer, then text to compare predictions on, then texts that ask for a repetition.
# Of images, each counts as IMAGE tokens.
TRANSFER_STEPS, TRANSFER_TOKENS, TRANSFER_LR = 24, 1024, 1e-2
SCORE_TOKENS = 4096
IMAGE = 128
# What is compared in place of mixers that start far from softmax, and the widest window that is (`scored_plan`).
STAND_IN = {"window": 128, "sink": 1}
RECALLS, RECALL_TOKENS = 4, 512
BATCH_TOKENS = 1024  # of one pass
# Mixtures that one pass computes, as further rows, at most: launches and Python take most of the time of a small one.
# And bytes of their logits, on a CPU and on a GPU.
TOGETHER, LOGITS_TOGETHER = 8, (1 << 28, 1 << 30)
# What a window of kept softmax costs is measured on the last tokens of so many rows, at least, of LONGEST tokens at
# most; on more rows where they are short, up to so many last tokens.
LONG_ROWS, WINDOW_TOKENS = 2, 4096
PACKAGES = TextSource(demo="packages")
KINDS = {"text": "text", "masked": "text", "images": "images"}  # of models: what they read


@dataclass(frozen=True)
class Scoring:
    """How `auto` scores layers and heads. `text` in blocks of `seq_len` tokens, or with `alone` in rows of one text;
    or a recipe's source of images, relative to `folder`. `device` is auto, cpu or cuda."""

    method: Method = "restore"
    text: Any = PACKAGES
    seq_len: int = 512
    alone: bool = False
    folder: Path = Path()
    device: str = "auto"
    seed: int = 0
    say: Say = print


def pricer(scoring: Scoring) -> Pricer:
    """What `plan_conversion` asks for the cost of a window in layers that the user named."""
    return functools.partial(price, scoring)


def choosers(scoring: Scoring) -> dict[str, Any]:
    """What `plan_conversion` needs where linearize is to choose layers, heads or windows, as its arguments."""
    return {"choose": functools.partial(choose, scoring), "choose_windows": functools.partial(choose_windows, scoring)}


class Scorer:
    """Compares a mixture with its source on fixed batches; `asked` [B,T] in each says which predictions count.

    `units` are what is compared: layers by number (None: all), or heads by layer and KV head. `advance` gets the
    tokens that each pass has read.
    """

    def __init__(
        self,
        mixture: Mixture,
        read: list[Batch],
        recall: list[Batch],
        units: Units | None = None,
        advance: Advance = silent,
    ) -> None:
        self.mixture, self.units, self.advance = mixture, units or mixture.layers, advance
        kind = "images" if "pixel_values" in read[0] else "text"
        self.batches = {kind: read} | ({"recall": recall} if recall else {})
        self.linear = self.kl([()])[0]
        check_finite("the source", *self.linear.values())

    @torch.no_grad()
    def kl(self, sets: Sequence[Collection[Any]]) -> list[dict[str, float]]:
        """How far the source and a mixture are apart, the mean over what is asked, of each kind of batch; for each set
        of units kept."""
        found: list[dict[str, float]] = [{} for _ in sets]
        for kind, batches in self.batches.items():
            sums = torch.zeros(len(sets), dtype=torch.float64)
            # Of a model without a head rows are compared, of others predictions.
            asked = [x["asked"] if has_head(self.mixture.model) else x["asked"].any(1) for x in batches]
            count = sum(int(one.sum()) for one in asked)
            for batch in batches:
                teacher = self.mixture.teacher(batch)
                self.advance(batch["asked"].numel())
                size = together(teacher)
                for start in range(0, len(sets), size):
                    some = sets[start : start + size]
                    rows = {name: value.repeat(len(some), *[1] * (value.ndim - 1)) for name, value in batch.items()}
                    logits = self.mixture.logits(rows, self.mixture.hybrids(some, len(teacher)))
                    parts = logits.split(len(teacher))
                    found_apart = [apart_on(batch, own, teacher, self.mixture.model) for own in parts]
                    sums[start : start + size] += torch.stack(found_apart).double().cpu()
                    self.advance(rows["asked"].numel())
            for values, total in zip(found, (sums / max(count, 1)).tolist(), strict=True):
                values[kind] = total
        return found

    def lost(self, sets: Sequence[Collection[Any]]) -> list[float]:
        """The share that is lost with each set of units kept, the mean of text and recall."""
        return [self._share(values) for values in self.kl(sets)]

    def _share(self, values: dict[str, Any]) -> Any:
        parts = [value / max(self.linear[kind], 1e-12) for kind, value in values.items()]
        return sum(parts) / len(parts)


def apart_on(batch: Batch, ours: Tensor, theirs: Tensor, model: Any) -> Tensor:
    """How far two results of `forward` are apart: the sum over what is asked in a batch of `apart`, and without a head
    of the error of rows of last hidden states."""
    return apart(ours, theirs, batch["asked"], 1.0) if has_head(model) else feature_error(ours, theirs, batch)


def together(logits: Tensor) -> int:
    """How many mixtures one pass computes, of each of which the logits are so large."""
    return min(TOGETHER, max(1, LOGITS_TOGETHER[logits.is_cuda] // logits.nbytes))


def scored_plan(plan: Plan) -> tuple[Plan, str]:
    """The plan whose mixers are compared with softmax, and what it has in place of those of `plan`; empty for nothing.

    A mixer that takes q and k in front of the source's norms and rotation is far from softmax after so few steps. What
    softmax gives back to it then is what any trained mixer has, and layers that retrieve are overlooked. A window
    alone, which needs no training, shows which layers look further. One as long as the texts would show nothing, so
    none is longer than that of STAND_IN (docs/measurements/layers.md).
    """
    with torch.device("meta"):
        far = any(build_mixer(step.mechanism, step.site, step.options).skip_qk_norm for step in plan.linear)
    sites, most = [step.site for step in plan.linear], STAND_IN["window"]
    words, wide = f"a window of {most} tokens", [step for step in plan.linear if step.options.get("window", 0) > most]
    if far and not any(site.extras or mismatch(site, LOCAL) for site in sites):
        scored, words = make_steps(sites, LOCAL, STAND_IN), f"{words} and the first"
    elif wide:
        scored = tuple(dataclasses.replace(step, options=step.options | {"window": most}) for step in wide)
    else:
        return plan, ""
    steps = {step.site.path: step for step in scored}
    return dataclasses.replace(plan, steps=tuple(steps.get(step.site.path, step) for step in plan.steps)), words


@device_memory()
def choose(
    scoring: Scoring,
    plan: Plan,
    source: Source,
    natives: SourceClasses,
    asked: str,
    count: int,
    units: Sequence[Unit],
    local: tuple[Step, ...] = (),
) -> Choice:
    """Which `count` of the `units`, layers that the plan makes linear or heads in them, had better keep softmax;
    `asked` is what the user wrote. Layers that are kept, also those that the plan does not name, have the windows of
    the steps `local`.

    Raises LinearizeError: 3 for a model that does not load, 4 for memory and devices, and as reading the text does.
    """
    heads = isinstance(units[0], tuple)
    of = counted(len(units), "KV head") if heads else f"layers {ranges([*units])}"
    kind = kind_of(natives.meta)
    data, processor = open_data(source, natives.meta, scoring)
    scoring.say(f"choosing {count} of {of} to keep softmax by --score-by {scoring.method}, on {KINDS[kind]}: {data}")
    model = load_source(source, natives, plan, scoring)
    if kind != "images":
        watch_tokens(model, processor)
    seq_len = Images.seq_len if kind == "images" else min(scoring.seq_len, most_tokens(model) or scoring.seq_len)
    train, read = batches_of(scoring, data, model, processor, seq_len)
    recall, lacking = list[Batch](), ""
    if kind == "text":
        recall, lacking = recall_batches(processor, min(seq_len, RECALL_TOKENS), scoring.seed, model.device)
    if lacking:
        scoring.say(f"scored on text alone: {lacking}")
    total = sum(tokens_of_choice(scoring.method, len(units), count, seq_len, kind == "text"))
    plan, stand_in = scored_plan(plan)
    with torch.random.fork_rng(), progress("choosing", total) as advance:
        torch.manual_seed(scoring.seed)
        mixture = Mixture(model, plan, local)
        mixture.calibrate(train[0])
        mixture.train_mixers(train, TRANSFER_LR, advance)
        scorer = Scorer(mixture, read, recall, units, advance)
        chosen = by_method(scoring.method, scorer, count)
        kl = {"linear": scorer.linear, "kept": scorer.kl([chosen.kept])[0]}
    scoring.say(f"chosen: {', '.join(named(one) if heads else str(one) for one in chosen.kept)}")
    return Choice(
        asked=asked,
        method=scoring.method,
        kept=tuple(map(named, chosen.kept)) if heads else tuple(chosen.kept),
        scores={named(unit) if heads else str(unit): chosen.scores[unit] for unit in units},
        text=str(data),
        tokens=sum(int(batch["valid"].sum()) for batch in read),
        recalls=sum(len(batch["input_ids"]) for batch in recall),
        lacking=lacking,
        seq_len=seq_len,
        kl=kl,
        measured=loss_of(model, read[0], mixture),
        stand_in=stand_in,
        window=window_cost(mixture, chosen.kept, local[0].options, scoring, processor) if local else {},
    )


@device_memory()
def price(scoring: Scoring, plan: Plan, source: Source, natives: SourceClasses) -> Choice:
    """What the windows of the layers cost whose softmax has one by `plan`, which the user named.

    Raises LinearizeError as `choose` does.
    """
    local = plan.local
    layers = sorted(step.site.layer for step in local)
    scoring.say(f"measuring what the window of {local[0].options['window']} tokens costs in {layers_named(layers)}")
    mixture, tokenizer = local_mixture(scoring, plan, source, natives)
    cost = window_cost(mixture, layers, local[0].options, scoring, tokenizer)
    return Choice(",".join(map(str, layers)), NAMED, tuple(layers), text=str(scoring.text), window=cost)


@device_memory()
def choose_windows(
    scoring: Scoring, plan: Plan, source: Source, natives: SourceClasses, asked: str, limit: float
) -> WindowChoice:
    """Which of the layers whose softmax has a window by `plan` keep it: those of which it costs at most `limit` nats a
    token, in each alone and in all of them together; `asked` is what the user wrote.

    Where all together cost more, the one that costs most sees all tokens, and so on. Raises LinearizeError as `choose`
    does.
    """
    local = plan.local
    layers, window = sorted({step.site.layer for step in local}), local[0].options
    scoring.say(f"measuring what a window of {window['window']} tokens costs in each of layers {ranges(layers)}")
    mixture, tokenizer = local_mixture(scoring, plan, source, natives)
    rows, lacking = window_rows(mixture.model, window, scoring, tokenizer)
    if "text" not in rows:
        return WindowChoice(asked, limit, text=str(scoring.text), lacking=lacking)
    if lacking:
        scoring.say(f"the cost of the window is measured on text alone: {lacking}")
    passes = len(layers) + 2
    with progress("measuring windows", passes * sum(tokens_in(batches) for batches in rows.values())) as advance:
        found = window_costs(mixture, [[layer] for layer in layers], rows, window, advance)
        costs = dict(zip(layers, found, strict=True))
        near = sorted(layers, key=lambda layer: largest_kl(costs[layer]))
        near = [layer for layer in near if largest_kl(costs[layer]) <= limit]
        together: dict[str, dict[str, float]] = {}
        while near:
            together = window_costs(mixture, [near], rows, window, advance)[0]
            if largest_kl(together) <= limit:
                break
            near, together = near[:-1], {}
    return WindowChoice(
        asked,
        limit,
        tuple(sorted(near)),
        {str(layer): cost for layer, cost in costs.items()},
        together,
        str(scoring.text),
    )


def local_mixture(scoring: Scoring, plan: Plan, source: Source, natives: SourceClasses) -> tuple[Mixture, Any]:
    """The source with softmax over all tokens, or over its window in the layers that have one by `plan`; and the
    tokenizer."""
    tokenizer = open_tokenizer(source, scoring)
    model = load_source(source, natives, plan, scoring)
    watch_tokens(model, tokenizer)
    return Mixture(model, dataclasses.replace(plan, steps=plan.local), plan.local), tokenizer


def window_cost(
    mixture: Mixture, kept: Collection[int], window: dict[str, int], scoring: Scoring, tokenizer: Any
) -> dict[str, dict[str, float]]:
    """What the source loses where softmax of the layers `kept` has its `window` and all others are as they were: as
    `Choice.window`; empty where no text that the model takes is longer than the window."""
    rows, lacking = window_rows(mixture.model, window, scoring, tokenizer)
    if rows and lacking:
        scoring.say(f"the cost of the window is measured on {' and '.join(rows)} alone: {lacking}")
    return window_costs(mixture, [kept], rows, window)[0]


def window_rows(
    model: Any, window: dict[str, int], scoring: Scoring, tokenizer: Any
) -> tuple[dict[str, list[Batch]], str]:
    """Batches of one row, twice as long as the window where the model takes that: parts of single documents of `text`,
    and texts that ask for a repetition (`recall`); `asked` in each says which predictions count. Some of them count
    past the window in each batch. And what is lacking, and why."""
    reach, most = window["window"] + window["sink"], longest_text(model)
    length = row_length(reach, most)
    if length <= reach + 1:  # the last token has no next one
        says = f"the model knows {most:,}" if most and most < LONGEST else f"no more than {LONGEST:,} are read"
        return {}, f"it takes rows of more than {reach + 1:,} tokens, and {says}"
    rows: dict[str, list[Batch]] = {}
    texts, origin = long_rows(scoring.text, tokenizer, length, row_count(length, reach))
    if origin == "documents":
        given = [torch.tensor([ids], device=model.device) for ids in texts]
        rows["text"] = [{"input_ids": ids, "asked": torch.ones_like(ids, dtype=torch.bool)} for ids in given]
    lacking = "" if rows else f"{scoring.text} has no document of {length:,} tokens, longer than the window"
    recall, without = recall_batches(tokenizer, length, scoring.seed, model.device)
    past = [batch for batch in recall if batch["asked"][:, reach:-1].any()]  # entries rarely fill a row
    if past:
        rows["recall"] = past[:LONG_ROWS]
    elif recall:
        without = f"a text of {length:,} tokens asks for no repetition past the window"
    return rows, lacking or without


def row_length(reach: int, most: int | None) -> int:
    """Tokens in a row on which the cost of a window is measured that leaves out all but `reach`, in a model that takes
    `most`."""
    return min(2 * reach, LONGEST, most or LONGEST)


def row_count(length: int, reach: int) -> int:
    """How many such rows of text are read: those with WINDOW_TOKENS last tokens, unless that is much text."""
    return max(LONG_ROWS, min(WINDOW_TOKENS // min(BATCH_TOKENS, length - reach), 4 * WINDOW_TOKENS // length))


def tokens_in(batches: list[Batch]) -> int:
    """All tokens of some batches."""
    return sum(batch["input_ids"].numel() for batch in batches)


@torch.no_grad()
def window_costs(
    mixture: Mixture,
    sets: Sequence[Collection[int]],
    rows: dict[str, list[Batch]],
    window: dict[str, int],
    advance: Advance = silent,
) -> list[dict[str, dict[str, float]]]:
    """`window_cost` on the last tokens of `rows`, BATCH_TOKENS at most and no more than the window leaves something out
    for, with each of the `sets` of layers."""
    mixers, reach = mixture.local, window["window"] + window["sink"]
    found: list[dict[str, dict[str, float]]] = [{} for _ in sets]
    for kind, batches in rows.items():
        sums, count = torch.zeros(len(sets), 3, dtype=torch.float64), 0
        for batch in batches:
            last = min(BATCH_TOKENS, batch["input_ids"].shape[1] - reach)
            wanted = next_token_targets(batch["input_ids"]).masked_fill(~batch["asked"], IGNORED)[:, -last:]
            theirs = mixture.teacher(batch, last)
            advance(batch["input_ids"].numel())
            for number, layers in enumerate(sets):
                mixture.local = {layer: mixers[layer] for layer in layers}
                ours = mixture.logits(batch, mixture.hybrid(mixture.layers), last)
                sums[number] += pair_sums(ours, theirs, wanted)
                advance(batch["input_ids"].numel())
            count += int((wanted != IGNORED).sum())
        if not count:
            continue
        for costs, row in zip(found, sums, strict=True):
            one, length = figures(row, count), batches[0]["input_ids"].shape[1]
            costs[kind] = {"length": length, "tokens": count, "source_ppl": one["teacher_ppl"]}
            costs[kind] |= {"ppl": one["student_ppl"], "kl": one["kl"]}
    mixture.local = mixers
    return found


def tokens_of_windows(layers: int, window: int, sink: int, most: int | None) -> int:
    """How many tokens `choose_windows` reads of text and of repetitions, each pass of a model counted."""
    reach = window + sink
    length = row_length(reach, most)
    rows = row_count(length, reach) + LONG_ROWS if length > reach + 1 else 0
    return (layers + 3) * rows * length


def rows_in(tokens: int, seq_len: int) -> int:
    """How many rows of `seq_len` tokens have so many tokens, or how many images count as so many."""
    return max(1, tokens // (IMAGE if seq_len == Images.seq_len else seq_len))


def tokens_of_choice(method: Method, units: int, count: int, seq_len: int, recall: bool) -> tuple[int, int]:
    """How many tokens, or images, `choose` reads, each pass of a model counted, and how many train its mixers. Texts
    that ask for a repetition are read where there is `recall`."""
    scored = rows_in(SCORE_TOKENS, seq_len) * seq_len + recall * RECALLS * min(seq_len, RECALL_TOKENS)
    trained = TRANSFER_STEPS * rows_in(TRANSFER_TOKENS, seq_len) * seq_len
    if method == "swaps":
        return (units + 5) * scored, trained
    return (sum(units - kept for kept in range(count)) + count + 4) * scored, trained


def by_method(method: Method, scorer: Scorer, count: int) -> Chosen:
    """The choice of one method."""
    units: list[Any] = list(scorer.units)
    fits = leaves_one(units) if isinstance(units[0], tuple) else any_fits
    return (swaps if method == "swaps" else restore)(units, count, scorer.lost, fits)


def open_data(source: Source, model: Any, scoring: Scoring) -> tuple[TextSource | Labelled, Any]:
    """What a model, which needs no weights, is compared on, and its tokenizer or image processor.

    Raises LinearizeError (exit 2), before weights are read, for text in place of images, and as `open_tokenizer`.
    """
    images = kind_of(model) == "images"
    if isinstance(scoring.text, TextSource) == images:
        found, due, recipe = ("text", "images", "vit-la") if images else ("images", "text", "hybrid")
        own = "{images: FOLDER}" if images else "{files: A.txt}"
        raise LinearizeError(
            f"{type(model).__name__} reads {due}, and auto would compare its predictions on {found}. Give {due}: "
            f"linearize convert {recipe} model.base=MODEL 'data.train={own}' convert.keep_softmax=auto:2"
        )
    if not images:
        return scoring.text, open_tokenizer(source, scoring)
    return find_images(scoring.text, scoring.folder), open_processor(source.folder, "images")


def open_tokenizer(source: Source, scoring: Scoring) -> Any:
    """The source's tokenizer. Raises LinearizeError (exit 2), before weights are read, for text that has no tokens to
    predict."""
    tokenizer = load_tokenizer(source.folder, bool(source.config.get("auto_map")))
    check_enough(scoring.text, tokenizer)
    return tokenizer


def load_source(source: Source, natives: SourceClasses, plan: Plan, scoring: Scoring) -> Any:
    """The source with its weights on the device: float32 on a CPU, as the result will be stored elsewhere."""
    device = scoring.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else getattr(torch, plan.dtype)
    try:
        with quiet():
            model = natives.head.from_pretrained(source.folder, config=natives.source_config, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise IncompatibleError(f"{source.name} cannot be loaded: {reason_of(error)}") from error
    return model.eval().to(device)


def batches_of(
    scoring: Scoring, data: TextSource | Labelled, model: Any, processor: Any, seq_len: int
) -> tuple[list[Batch], list[Batch]]:
    """Batches to train mixers on, and others to compare predictions on; the same ones where there is little data."""
    steps = rows_in(TRANSFER_TOKENS, seq_len)
    with tempfile.TemporaryDirectory() as scratch:
        samples, order = samples_of(scoring, data, model, processor, seq_len, Path(scratch))
        scored = min(rows_in(SCORE_TOKENS, seq_len), max(1, len(order) // 2))
        learned = order[scored : scored + TRANSFER_STEPS * steps] or order
        train = cut(samples, learned, steps, model.device)
        read = cut(samples, order[:scored], rows_in(BATCH_TOKENS, seq_len), model.device)
    hides = kind_of(model) == "masked" and has_head(model)
    return train, [batch | {"asked": batch["labels"] != IGNORED if hides else batch["valid"]} for batch in read]


def samples_of(
    scoring: Scoring, data: TextSource | Labelled, model: Any, processor: Any, seq_len: int, scratch: Path
) -> tuple[Samples, list[int]]:
    """The samples of `data` for this model, and in which order they are read: images at random, for a folder has them
    class by class."""
    if isinstance(data, Labelled):
        images = Images(data, processor, None, learns=False, hidden=hidden_patches(model), seed=scoring.seed)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(scoring.seed))
        return images, order.tolist()
    wanted = TRANSFER_STEPS * rows_in(TRANSFER_TOKENS, seq_len) * seq_len + SCORE_TOKENS
    blocks = build_blocks(data, processor, seq_len, scratch, sft=False, max_tokens=wanted, texts=scoring.alone)
    numbers = [*range(len(blocks))]
    if kind_of(model) == "text":
        return blocks, numbers
    return MaskedBlocks(blocks, processor, scoring.seed, hide=has_head(model)), numbers


def cut(samples: Samples, numbers: list[int], size: int, device: torch.device) -> list[Batch]:
    """Batches of `size` samples, of which none is longer than it has to be."""
    places = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    return by_length([collate([samples[number] for number in part], device) for part in places])


def loss_of(model: Any, batch: Batch, mixture: Mixture) -> str:
    """What `apart_on` measures of a model, in words."""
    if not has_head(model):
        return "squared error of last hidden states, relative to the source's"
    if is_numbers(mixture.teacher(batch)):
        return "squared error, relative to the source's"
    return f"KL from the source in nats {'an image' if kind_of(model) == 'images' else 'a token'}"


def recall_batches(tokenizer: Any, length: int, seed: int, device: torch.device) -> tuple[list[Batch], str]:
    """Texts that ask for what they said before, and why there are none: where they do not fit into `length` tokens."""
    writer = Writer(tokenizer, seed)
    try:
        rows = [writer.recall(length) for _ in range(RECALLS)]
    except LinearizeError:
        return [], f"a text that asks for a repetition does not fit into {length} tokens"
    size = max(1, BATCH_TOKENS // length)
    return [recall_batch(rows[start : start + size], device) for start in range(0, len(rows), size)], ""


def recall_batch(rows: list[Row], device: torch.device) -> Batch:
    """Rows filled up at the right; what counts are the predictions of the values asked for."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + row.ids[:1] * (longest - len(row.ids)) for row in rows], device=device)
    asked = torch.zeros_like(ids, dtype=torch.bool)
    for number, row in enumerate(rows):
        for place in row.asked:
            asked[number, place.start - 1 : place.stop - 1] = True
    return {"input_ids": ids, "position_ids": torch.arange(longest, device=device).expand_as(ids), "asked": asked}
