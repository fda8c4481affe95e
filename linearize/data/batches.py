"""Batches of each kind of model: packed text, masked text or images, and how the model is called with them.

Packed text has `position_ids`, masked text `attention_mask`, images `pixel_values`. Each has `labels`, -100 where
nothing is learned, and `valid`, which counts what a loss without labels is a mean over: tokens, or images.

What a head predicts has one of two kinds, which its output shows, whatever the architecture. Logits are distributions:
over tokens, or over classes of whole images, of patches or of pixels. Anything else is numbers, such as a depth.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoImageProcessor

from ..checkpoint.shards import file_hashes
from ..errors import IncompatibleError, LinearizeError, ResourceError, absent, check_file, reason_of
from ..measure.generate import check_tokens, load_tokenizer
from ..recipe.data import (
    ArraySource,
    Data,
    ImageSource,
    MixSource,
    Pack,
    TeacherSource,
    holds_images,
    local_paths,
    parts_of,
)
from ..recipe.recipe import Recipe, Stage
from ..train.losses import IGNORED, next_token_targets
from ..train.runtime import stage_steps, to_source
from .augment import Augment
from .documents import TextSource, check_enough
from .images import Images, find_images, image_files
from .kinds import Kind, check_trains, has_head, kind_of
from .packing import Blocks, MaskedBlocks, MixedBlocks, build_blocks, digest, identity

Batch = dict[str, Tensor]
Samples = Blocks | MixedBlocks | MaskedBlocks | Images
HASHED_IMAGES = 2**30  # bytes of a folder whose contents are compared when a run goes on
FEW_IMAGES = 16  # of a step; docs/vision.md has what one a step did
INPUTS = ("input_ids", "position_ids", "attention_mask", "pixel_values", "bool_masked_pos")


def run(model: Any, batch: Batch, *, head: bool | int = True) -> Any:
    """What one pass of a model puts out.

    Packed text has no mask and no cache: transformers then keeps documents apart by their positions. Where the model
    can leave out logits, those of the last `head` tokens are there: of all (True), or of one (False).
    """
    inputs: dict[str, Any] = {name: batch[name] for name in INPUTS if name in batch}
    if head is not True and keeps_logits(type(model).forward):
        inputs["logits_to_keep"] = max(int(head), 1)
    if "position_ids" in batch:
        inputs["use_cache"] = False
    return model(**inputs)


@functools.cache
def keeps_logits(code: Any) -> bool:
    """Whether that forward of a model can leave out logits; asked in every step, and slow to find out."""
    return "logits_to_keep" in inspect.signature(code).parameters


def forward(model: Any, batch: Batch) -> Tensor:
    """Logits [B,T,V] of text; what `prediction` has of images; of a model without a head its last hidden states
    [B,T,hidden], of a backbone its last map of features as such. Raises LinearizeError (exit 3) as `prediction`.
    """
    out = run(model, batch)
    if hasattr(out, "feature_maps"):
        states = out.feature_maps[-1]
        return states.flatten(2).transpose(1, 2) if states.ndim == 4 else states
    if not hasattr(out, "logits") and hasattr(out, "last_hidden_state"):
        return out.last_hidden_state
    return prediction(out, type(model).__name__) if "pixel_values" in batch else out.logits


def prediction(out: Any, name: str) -> Tensor:
    """What the head of a model, whose class is `name`, says of images, by the kind of its output.

    Logits are distributions over classes: of whole images [B,1,K], else of N patches or pixels [B,N,K]. One output of
    another name, or of one class, is numbers [B,P]: a depth, a reconstruction. Raises LinearizeError (exit 3) for
    several outputs, which are more than one distribution or one map.
    """
    found = {key: value for key, value in out.items() if isinstance(value, Tensor) and key != "loss"}
    logits = found.get("logits")
    if logits is not None and logits.ndim == 2 and logits.shape[1] > 1:
        return logits[:, None]
    if len(found) != 1:
        raise IncompatibleError(
            f"{name} puts out {', '.join(found) or 'no tensor'} for an image; finetune and eval compare one map of "
            "classes or of numbers with the teacher's. Of the stages choose attention_transfer, without data.eval"
        )
    ((key, value),) = found.items()
    classes = value.shape[1] if value.ndim == 4 else value.shape[-1]
    if key != "logits" or classes == 1:
        return value.flatten(1)
    return value.flatten(2).transpose(1, 2) if value.ndim == 4 else value


def is_numbers(found: Tensor) -> bool:
    """Whether a prediction of `forward` is numbers [B,P], and no distributions."""
    return found.ndim == 2


def is_dense(found: Tensor, batch: Batch) -> bool:
    """Whether there are no labels for a prediction of `forward`: it is numbers, or classes of parts of an image."""
    return is_numbers(found) or found.shape[:2] != batch["labels"].shape


def hidden_patches(model: Any) -> int:
    """How many patches an image of a model has that predicts hidden ones; 0 of other models."""
    if not has_head(model) or "bool_masked_pos" not in inspect.signature(type(model).forward).parameters:
        return 0
    counts = (getattr(module, "num_patches", 0) for module in model.modules())
    return next((count for count in counts if isinstance(count, int) and count), 0)


def targets(batch: Batch) -> Tensor:
    """What the logits at each place should be, -100 where nothing: [B,T]."""
    return next_token_targets(batch["labels"]) if "position_ids" in batch else batch["labels"]


def real_tokens(batch: Batch) -> Tensor | None:
    """Which tokens the attention modules see are text [B,T]; None for images, whose tokens are all real."""
    return None if "pixel_values" in batch else batch["valid"]


def collate(items: list[Batch], device: torch.device) -> Batch:
    """Stack samples and move them."""
    return {key: moved(torch.stack([item[key] for item in items]), device) for key in items[0]}


def moved(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; a GPU goes on with its work meanwhile, which a copy from other memory would wait for."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def by_length(batches: list[Batch]) -> list[Batch]:
    """The same rows of text, the shortest first, in batches of the same size, each without the columns that are padding
    in all of its rows: these take time and change nothing. Rows that are packed, or images, stay as they are."""
    if "attention_mask" not in batches[0]:
        return batches
    rows = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    lengths = rows["attention_mask"].sum(1)
    parts = lengths.argsort(stable=True).split(len(batches[0]["valid"]))
    return [{key: value[part, : max(1, int(lengths[part].max()))] for key, value in rows.items()} for part in parts]


def blank(sample: Batch) -> Batch:
    """The same, of which nothing counts."""
    nothing = torch.full_like(sample["labels"], IGNORED)
    return sample | {"labels": nothing, "valid": torch.zeros_like(sample["valid"])}


# ---------------------------------------------------------------- opening


def tokens_per_sample(data: Data) -> int:
    """What a sample counts in budgets: its tokens, or one for an image."""
    return Images.seq_len if holds_images(data.train) else data.pack.seq_len


def open_processor(folder: Path, kind: Kind) -> Any:
    """The checkpoint's tokenizer (exit 3 where it has none), or its image processor (None where it has none)."""
    # Its code is checked by now; without the flag transformers asks on the terminal because of the model's.
    if kind != "images":
        return load_tokenizer(folder, True)
    if not (folder / "preprocessor_config.json").exists() and not (folder / "processor_config.json").exists():
        return None
    return image_processor(str(folder), True)


def image_processor(name: str, trust_remote_code: bool) -> Any:
    """The image processor of a folder or Hub repository; where transformers (5.17) wants torchvision to find it, by its
    own name. Raises LinearizeError: 3 where there is none, 4 where a package is missing."""
    try:
        try:
            return AutoImageProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
        except ImportError:
            settings, _ = transformers.ImageProcessingMixin.get_image_processor_dict(name)
            native = getattr(transformers, settings.get("image_processor_type", ""), None)
            if native is None:
                raise
            return native.from_pretrained(name)
    except ImportError as error:
        raise ResourceError(f'images need: pip install "linearize[vision]" ({error})') from error
    except (OSError, ValueError) as error:
        raise IncompatibleError(f"no image processor can be loaded from {name}: {reason_of(error)}") from error


def open_samples(
    source: Any,
    pack: Pack,
    model: Any,
    processor: Any,
    cache: Path,
    *,
    start: Path,
    sft: bool,
    seed: int,
    max_tokens: int | None,
    say: Callable[[str], None],
    augment: Augment | None = None,
    erased: float = 0.0,
    own: Callable[[TeacherSource], TextSource] | None = None,
) -> Samples:
    """The samples of a recipe's source for this model, which `check_source` let pass; relative files begin at `start`,
    packed text is kept in `cache`. `say` gets how classes of images are numbered. `augment` changes images each time,
    and so does `erased`, the chance of random erasing. `own` finds the text that a teacher has written.
    """
    kind = kind_of(model)
    if kind == "images":
        config = model.config if has_head(model) else None
        images = Images(
            find_images(source, start),
            processor,
            config,
            sft,
            augment,
            hidden=hidden_patches(model),
            seed=seed,
            erased=erased,
        )
        if images.note:
            say(images.note)
        if sft and set(images.labels) == {IGNORED}:
            message = f"{images.found.where} names no class of an image, and sft learns and scores nothing else"
            raise LinearizeError(f"{message}. Give a folder for each class, labels or label_key, or choose logit_kl")
        return images
    found = []
    for part, limit in limits(source, max_tokens):
        text = own(part) if own and isinstance(part, TeacherSource) else to_source(part, pack.text_key, start)
        alone, answers = pack.rows == "texts", sft and kind == "text"
        check_enough(text, processor)
        found.append(build_blocks(text, processor, pack.seq_len, cache, sft=answers, max_tokens=limit, texts=alone))
    blocks = found[0] if len(found) == 1 else MixedBlocks(found, [share for _, share in parts_of(source)])
    return blocks if kind == "text" else MaskedBlocks(blocks, processor, seed, hide=has_head(model))


def limits(source: Any, max_tokens: int | None) -> list[tuple[Any, int | None]]:
    """Each part of a source and how many of its tokens are read at most, where all are to be `max_tokens`: of a mix the
    share of each long part, and all of the others; None: all."""
    parts = parts_of(source)
    if len(parts) == 1 or max_tokens is None:
        return [(part, max_tokens) for part, _ in parts]
    return [(part, math.ceil(max_tokens * share) if is_long(part) else None) for part, share in parts]


def is_long(source: Any) -> bool:
    """Whether a source has far more text than a run may need, so that reading it has to end somewhere."""
    return getattr(source, "streaming", False) or getattr(source, "demo", None) == "packages"


def token_limit(recipe: Recipe, stage: Stage, split: str, processes: int, max_steps: int | None = None) -> int | None:
    """How many tokens of a stage's train or eval data are read at most; None: all.

    Of sources with far more text than a run may need, as many as the stage that needs most: one limit for all stages,
    so that they share one file of packed text.
    """
    data = recipe.data_for(stage)
    if split == "eval":
        return recipe.eval.max_tokens
    if not any(is_long(part) for part, _ in parts_of(data.train)):
        return None
    budgets = []
    for other in recipe.stages:
        tokens = other.batch.blocks * processes * data.pack.seq_len
        budgets.append((stage_steps(other, other.batch.blocks * processes, data.pack.seq_len, max_steps) or 0) * tokens)
    return max(budgets) or None


def check_source(source: Any, model: Any, start: Path, where: str) -> None:
    """Refuse the data `where` in a recipe: text for a model of images, images for another (exit 3), or what is not
    there (exit 2); and by `check_trains`."""
    kind = kind_of(model)
    check_trains(model, kind)
    if isinstance(source, MixSource):
        for number, (part, _) in enumerate(parts_of(source)):
            check_source(part, model, start, f"{where}.mix[{number}].source")
        return
    if isinstance(source, TeacherSource) and kind != "text":
        message = f"{where}: {type(model).__name__} writes no text. Give files, or path; of images also arrays"
        raise IncompatibleError(message)
    if holds_images(source) != (kind == "images"):
        found, due = ("text", "images") if kind == "images" else ("images", "text")
        instead = "images: FOLDER, arrays: FILE.npz, or path and image_key" if kind == "images" else "files, or path"
        raise IncompatibleError(f"{where} holds {found}, and {type(model).__name__} learns from {due}: give {instead}")
    check_there(source, start)


def check_there(source: Any, start: Path) -> None:
    """Raise LinearizeError (exit 2) unless the files or the folder that a source names are there."""
    for part, _ in parts_of(source):
        for number, path in enumerate(local_paths(part, start)):
            if not path.exists():
                kind = "folder" if isinstance(part, ImageSource) and number == 0 else "file"
                raise absent(path, f"no such {kind}")
            check_file(path)


def source_hash(source: Any, start: Path) -> str:
    """A hash of what a recipe's source holds: of a dataset on the Hub its address, of images beyond HASHED_IMAGES bytes
    their names, sizes and times of change, else of all bytes.
    """
    facts: Any
    if isinstance(source, MixSource):
        facts = [[source_hash(part, start), share] for part, share in parts_of(source)]
    elif isinstance(source, ImageSource):
        folder, *classes = local_paths(source, start)
        files = image_files(folder)
        stats = {file.relative_to(folder).as_posix(): file.stat() for file in files}
        if sum(one.st_size for one in stats.values()) <= HASHED_IMAGES:
            facts = [*file_hashes(folder, files, digest).items()]
        else:
            facts = [[name, [one.st_size, one.st_mtime_ns]] for name, one in stats.items()]
        facts += map(digest, classes)
    elif isinstance(source, TeacherSource):
        facts = [source.model_dump_json(), *(digest(file) for file in local_paths(source, start))]
    elif isinstance(source, ArraySource):
        facts = [digest(file) for file in local_paths(source, start)]
    else:
        facts = identity(to_source(source, "text", start))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def check_vocabulary(tokenizer: Any, model: Any, data: list[Samples]) -> None:
    """Refuse (exit 3) a tokenizer that is not the model's: one with more tokens, or data with ids out of range.

    Added tokens alone may exceed the embedding, as an image token in a text model does, unless the data has them.
    """
    weight = model.get_input_embeddings().weight
    rows = getattr(weight, "ds_shape", weight.shape)[0]
    highest = tokenizer.vocab_size - 1
    if highest < rows <= len(tokenizer) - 1:
        highest = max(int(b[i]["input_ids"].max()) for b in data for i in range(len(b)))
    check_tokens(model, highest)
