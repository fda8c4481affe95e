"""`linearize logits`, the story on one screen: find the teacher, read a recipe's text, write what it predicts.

Read `write_logits` first; data/logits.py has the format, train/teacher.py the checks and what rows depend on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from . import __version__
from .checkpoint.atomic import lock_folder, write_atomically
from .checkpoint.provenance import check_code, open_config
from .checkpoint.source import open_source
from .convert import load_config
from .data.batches import check_source, check_vocabulary, collate, forward, open_samples, targets
from .data.logits import (
    FORMAT,
    RECORD,
    Facts,
    StoredLogits,
    is_shard,
    is_written,
    key_of,
    rows_per_shard,
    shard_name,
    token_bytes,
    write_rows,
)
from .data.packing import BlockOrder, Blocks, MixedBlocks, data_fingerprint
from .demo import named_base
from .errors import CheckFailedError, LinearizeError, ResourceError, existing_folder, writing
from .job.checks import check_packages
from .job.resolve import say_nothing
from .job.source import base_path
from .plan.plan import some
from .recipe.data import TeacherSource, parts_of
from .recipe.models import Scratch, Teacher
from .recipe.recipe import LogitKL, OnPolicyKL, Recipe, Stage
from .terminal.output import short, size
from .terminal.progress import Advance, progress, silent
from .train.losses import target_log_probs, top_logits
from .train.random_model import config_of
from .train.runtime import Say, in_turns, make_accelerator
from .train.teacher import (
    Named,
    base_tokenizer,
    check_teacher_model,
    check_tokenizers,
    common_vocabulary,
    load_teacher,
    meta_teacher,
    needed,
    open_teacher,
    rows_read,
    teacher_line,
    vocabulary_of,
)

CACHE = ".linearize-text"  # packed text, until the folder is complete


@dataclass
class RowSet:
    """Rows of one source for a stage: the first `rows` of its blocks, in the order of `facts`."""

    facts: Facts
    stage: Stage
    blocks: Blocks | MixedBlocks
    rows: int
    per_shard: int

    def shards(self) -> list[range]:
        """The rows of each shard."""
        starts = range(0, self.rows, self.per_shard)
        return [range(start, min(start + self.per_shard, self.rows)) for start in starts]

    def block_of(self) -> Callable[[int], int]:
        """Row -> block: in the order of evaluation, or of the seed."""
        if self.facts["split"] == "eval":
            return lambda row: row
        return BlockOrder(len(self.blocks), self.facts["seed"]).block

    def record(self) -> dict[str, Any]:
        """The set as logits.json has it."""
        return {
            "facts": self.facts,
            "blocks": len(self.blocks),
            "fingerprint": data_fingerprint(self.blocks),
            "rows": self.rows,
            "per_shard": self.per_shard,
            "shards": [shard_name(self.facts, number) for number in range(len(self.shards()))],
        }


def write_logits(recipe: Recipe, output: Path, top: int, *, dry_run: bool = False, say: Say = print) -> dict[str, Any]:
    """Write the `top` likeliest tokens of a recipe's teacher, of all text that its logit_kl stages and its evaluations
    read, into the folder `output`. A recipe without a teacher has its base as one. With `dry_run` only count.

    Shards that an earlier call left there stay, so that a call that was stopped goes on; of several processes each
    writes its share. Returns `output`, `tokens`, `bytes`, `top` and the `teacher`; a dry run fetches no weights from
    the Hub, and has None as their `sha256`. Raises LinearizeError: 2 for the recipe or a folder of something else, 3
    for a teacher that does not fit, 4 for a disk that is too small, 6 for logits that are not finite.
    """
    named, tokenizer, vocabulary = open_teacher_named(recipe, top)
    check_folder(output, named.facts(), top, vocabulary)  # before gigabytes are fetched
    if not dry_run:
        named = named.downloaded()
    facts = named.facts()
    accelerator = make_accelerator(recipe, output)
    if not accelerator.is_main_process:
        say = say_nothing
    with text_folder(output, dry_run, accelerator.is_main_process) as cache:
        before = check_folder(output, facts, top, vocabulary)  # again: another call may have ended meanwhile
        with accelerator.main_process_first(), writing(output):
            sets = open_sets(recipe, named, tokenizer, cache, top, accelerator.num_processes)
        for one in sets:  # what an earlier recipe read more of stays
            one.rows = max([one.rows, *(old["rows"] for old in before if old["facts"] == one.facts)])
        tokens = sum(one.rows * one.blocks.seq_len for one in sets)
        count = tokens * token_bytes(top)
        told = {"output": str(output), "tokens": tokens, "bytes": count, "top": top, "teacher": facts}
        say(f"{short(tokens)} tokens, of each the {top} likeliest of {vocabulary:,}: {size(count)} in {output}")
        if dry_run:
            say(f"{size(free_bytes(output))} are free there")
            return told
        work: list[tuple[RowSet, range, Path, str]] = []
        for one in sets:
            key = key_of(facts, top, vocabulary, one.facts, data_fingerprint(one.blocks))
            shards = enumerate(one.shards())
            work += [(one, rows, output / shard_name(one.facts, number), key) for number, rows in shards]
        left = [not is_written(path, key, len(rows)) for _, rows, path, key in work]
        due = sum(len(job[1]) * job[0].blocks.seq_len for job, missing in zip(work, left, strict=True) if missing)
        check_disk(output, due * token_bytes(top))
        accelerator.wait_for_everyone()  # all have looked before anyone writes
        if any(left):
            with in_turns(accelerator):
                teacher = load_teacher(named, accelerator.device)
            check_vocabulary(tokenizer, teacher, [one.blocks for one in sets])
            say(teacher_line(named, teacher))
            own = range(accelerator.process_index, len(work), accelerator.num_processes)
            mine = [work[i] for i in own if left[i]]
            total = sum(len(rows) for _, rows, _, _ in mine)
            bar = progress("logits", total) if accelerator.is_main_process else contextlib.nullcontext(silent)
            with bar as advance:
                for one, rows, path, key in mine:
                    write_rows(path, predicted(one, rows, top, vocabulary, teacher, accelerator, advance), key)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            others = [old for old in before if old["facts"] not in [one.facts for one in sets]]
            record = {"format": FORMAT, "linearize": __version__, "teacher": facts, "k": top, "vocabulary": vocabulary}
            record["sets"] = [*others, *(one.record() for one in sets)]
            with writing(output):
                write_atomically(output / RECORD, json.dumps(record, indent=2) + "\n")
            say(f"wrote {output}")
    accelerator.end_training()
    return told


@contextlib.contextmanager
def text_folder(output: Path, dry_run: bool, main: bool) -> Iterator[Path]:
    """Within: where text is packed, in `output` so that several processes find it, for this call alone; a dry run
    leaves that as it is. A call that wrote no rows leaves no folder that was not there.

    Raises LinearizeError (exit 2) where another call writes this output.
    """
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="linearize-") as apart:
            yield Path(apart)
        return
    if not main:
        yield output / CACHE
        return
    made = not output.exists()
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        handle = lock_folder(output / CACHE)
    try:
        for path in output.glob("*.partial"):  # a killed call left it, which may have been of another text
            if is_shard(path.name):
                path.unlink()
        yield output / CACHE
    finally:
        shutil.rmtree(output / CACHE, ignore_errors=True)
        os.close(handle)
        if made and output.is_dir() and not any(output.iterdir()):
            output.rmdir()


def open_teacher_named(recipe: Recipe, top: int) -> tuple[Named, Any, int]:
    """The teacher that is to be written, the tokenizer of the text, and how many tokens teacher and base share.

    Raises LinearizeError for all that can be refused without reading text or weights.
    """
    learning = [stage for stage in recipe.stages if isinstance(stage, LogitKL) and stage.learns_logits]
    if not learning:
        raise LinearizeError("the recipe has no logit_kl stage, and only those read stored logits")
    for stage in recipe.stages:
        if isinstance(stage, OnPolicyKL):
            raise LinearizeError(f"{stage.name}: its text is written while it trains, so no logits of it can be stored")
    named = teacher_to_write(recipe)
    tokenizer, model = base_tokenizer(recipe), meta_teacher(named)
    check_teacher_model(named, model, recipe)
    check_tokenizers(named, tokenizer)
    vocabulary = common_vocabulary(base_vocabulary(recipe), vocabulary_of(model), tokenizer, named.name)
    if top > vocabulary:
        raise LinearizeError(f"--top {top}: the models have {vocabulary} tokens. Give {vocabulary}, or less")
    check_packages(recipe)
    for stage in recipe.stages:
        for name, source in recipe.sources_of(stage).items():
            if any(isinstance(part, TeacherSource) for part, _ in parts_of(source)):
                message = f"{stage.name}: the teacher writes its text when the run begins. Give data.train files"
                raise LinearizeError(f"{message}: those of such a run are in its folder cache")
            check_source(source, model, recipe.folder, name)
    return named, tokenizer, vocabulary


def teacher_to_write(recipe: Recipe) -> Named:
    """The teacher that a recipe names, else its base. Raises LinearizeError (exit 2) where neither can be asked."""
    asked, base = recipe.teacher, recipe.model.base
    if asked is None and recipe.convert is not None and not isinstance(base, Scratch):
        model = recipe.model
        asked = Teacher(
            model=base, revision=model.revision, dtype=model.dtype, trust_remote_code=model.trust_remote_code
        )
        if open_teacher(asked).converted:
            asked = None
    if asked is None or asked.model is None:
        raise LinearizeError("the recipe names no model whose logits could be written. Add teacher.model=MODEL")
    return Named(open_teacher(asked), None, asked.dtype, asked.trust_remote_code, named_base(asked.model))


def base_vocabulary(recipe: Recipe) -> int:
    """How many tokens the logits of a recipe's base have."""
    base, trust = recipe.model.base, recipe.model.trust_remote_code
    if isinstance(base, Scratch):
        config = config_of(base, trust)
    else:
        source = open_source(base_path(recipe), recipe.model.revision, weights=False)
        if source.converted:
            check_code(source.folder, trust)
            config = open_config(source.folder)
        else:
            config = load_config(source, trust)
    return int(config.get_text_config().vocab_size)


def check_folder(output: Path, teacher: dict[str, Any], top: int, vocabulary: int) -> list[dict[str, Any]]:
    """The sets that an earlier call completed in `output`. Raises LinearizeError (exit 2) for a folder of something
    else, of another teacher, or of another number of tokens."""
    if not output.exists():
        return []
    foreign = ["it is a file"] if not output.is_dir() else []
    if not foreign:
        names = [path.name for path in output.iterdir()]
        foreign = [name for name in names if name not in (RECORD, CACHE, f"{RECORD}.tmp") and not is_shard(name)]
    if foreign:
        raise LinearizeError(f"{output} holds what linearize logits did not write ({some(foreign)}). Choose another -o")
    if not (output / RECORD).exists():
        return []
    stored = StoredLogits(output)
    teacher = {**teacher, "sha256": teacher["sha256"] or stored.teacher["sha256"]}
    if (stored.teacher, stored.k, stored.vocabulary) != (teacher, top, vocabulary):
        raise LinearizeError(
            f"{output} has the {stored.k} likeliest of {stored.vocabulary:,} tokens of {stored.teacher['model']} "
            f"({short_name(stored.teacher)}), not the {top} of {vocabulary:,} of {teacher['model']} "
            f"({short_name(teacher)}). Choose another -o"
        )
    return stored.sets


def short_name(teacher: dict[str, Any]) -> str:
    """The commit of a teacher of the Hub, or the hash of one on disk, in 16 digits."""
    return str(teacher["commit"] or teacher["sha256"])[:16]


def open_sets(recipe: Recipe, named: Named, tokenizer: Any, cache: Path, top: int, processes: int) -> list[RowSet]:
    """The text that a run reads and asks the teacher about, packed; what several stages read comes once."""
    model, sets = meta_teacher(named), list[RowSet]()
    for facts, stage in needed(recipe, tokenizer, processes):
        split, data = facts["split"], recipe.data_for(stage)
        known = next((one for one in sets if one.facts == facts), None)
        if known is None:
            blocks = open_samples(
                getattr(data, split),
                data.pack,
                model,
                tokenizer,
                cache,
                start=recipe.folder,
                sft=facts["completion_only"],
                seed=recipe.seed,
                max_tokens=facts["max_tokens"],
                say=say_nothing,
            )
            assert isinstance(blocks, Blocks | MixedBlocks)
            known = RowSet(facts, stage, blocks, 0, rows_per_shard(blocks.seq_len, top))
            sets.append(known)
        known.rows = max(known.rows, rows_read(recipe, stage, split, len(known.blocks), processes, None))
    return sets


def free_bytes(output: Path) -> int:
    """What is free on the disk of a folder that may not be there yet."""
    return shutil.disk_usage(existing_folder(output)).free


def check_disk(output: Path, due: int) -> None:
    """Raise LinearizeError (exit 4) where the disk has no room for so many bytes."""
    free = free_bytes(output)
    if due > free:
        raise ResourceError(
            f"{output} would take {size(due)} more, {size(free)} are free. Make room, choose another -o, or a smaller "
            "--top"
        )


@torch.no_grad()
def predicted(
    one: RowSet, rows: range, top: int, vocabulary: int, teacher: Any, accelerator: Accelerator, advance: Advance
) -> dict[str, Tensor]:
    """What a teacher predicts of these rows of a set, as a shard has it."""
    order, temperature, size_of = one.block_of(), one.facts["temperature"], one.stage.batch.per_device
    found: dict[str, list[Tensor]] = {"values": [], "indices": [], "rest": [], "target": []}
    for start in range(rows.start, rows.stop, size_of):
        chosen = range(start, min(start + size_of, rows.stop))
        batch = collate([one.blocks[order(row)] for row in chosen], accelerator.device)
        with accelerator.autocast():
            logits = forward(teacher, batch)
        likeliest = top_logits(logits[..., :vocabulary], top, temperature=temperature)
        if likeliest.values.isnan().any():  # of tokens with a logit that is infinite or no number
            raise CheckFailedError(
                f"the teacher's logits are not finite in {teacher.dtype}. Set teacher.dtype: bfloat16 or float32"
            )
        found["values"].append(likeliest.values.float().cpu())
        found["indices"].append(likeliest.indices.int().cpu())
        found["rest"].append(likeliest.rest.float().cpu())
        found["target"].append(target_log_probs(logits, targets(batch)).float().cpu())
        advance(len(chosen))
    return {name: torch.cat(parts) for name, parts in found.items()}
