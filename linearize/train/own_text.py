"""A teacher's own text, for want of data: written in large batches, kept as jsonl, the same for a seed.

A folder holds `batch.json`, how many texts are written at a time, and shards 00000.jsonl, 00001.jsonl, ..: one batch
each, complete or absent. Shard k is a function of the model, the prompts, the batch and (seed, k), so writing that was
stopped goes on behind the last shard. A row is {text} or {messages}, with `tokens` that the teacher wrote, and `ended`,
whether it ended the text itself. An empty line behind the rows says that none of them is lost.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, StaticCache

from ..checkpoint.atomic import write_atomically
from ..data.chat import Message, asked_of, end_tokens, opened_turn, prompt_ids
from ..data.documents import TextSource, documents_of, end_token, start_tokens
from ..data.packing import hashed_generator
from ..errors import Exit, LinearizeError, undamaged, writing
from ..measure.free_generation import first_end
from ..measure.generate import check_tokens
from ..probe.trace import quiet
from ..recipe.data import CHAT, OwnText
from ..terminal.output import short
from ..terminal.progress import progress
from ..verify.child.behaviours import held_bytes
from ..verify.child.inputs import cache_of, most_tokens, with_cache
from .step_attention import step_attention

BATCH = "batch.json"
LARGEST, ON_CPU = 2048, 16  # texts at a time
SHARE = 0.6  # of the free memory, for caches and logits
LOGITS = 24  # bytes for each text and token of the vocabulary: logits, scores, probabilities, what is drawn
PROMPTS = 100_000  # that are read of a file at most
CHARACTERS = 32  # of a text for each token of its prompt, at most
EMPTY = 3  # batches without a text, one after another, that end the writing
QUESTION = 128  # tokens of a user's message that the teacher writes


class Prompt(NamedTuple):
    """What the teacher reads; `shown` of it is part of the text, or `messages` go before its answer."""

    ids: list[int]
    shown: list[int]
    messages: list[Message] | None = None


def find_prompts(asked: OwnText, source: TextSource | None, tokenizer: Any) -> list[Prompt]:
    """The prompts of a recipe, those of a file from `source`. Raises LinearizeError: 2 for none of a length that is
    read, 3 for messages without a chat template."""
    start = start_tokens(tokenizer)
    if asked.prompts == CHAT:
        return [Prompt(opened_turn(tokenizer, "data.train.teacher.prompts chat"), [])]
    if source is None:
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else end_token(tokenizer)
        return [Prompt(start, [])] if start else [Prompt([begin], [begin])]
    found = []
    for where, document in islice(documents_of(source), PROMPTS):
        if isinstance(document, str):
            text = document[: CHARACTERS * asked.prompt_tokens]
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][: asked.prompt_tokens]
            found.append(Prompt(start + ids, ids))
        elif messages := asked_of(document):
            found.append(Prompt(prompt_ids(tokenizer, messages, where), [], messages))
    if not found:
        raise LinearizeError(f"{source}: no conversation begins with a message that the assistant answers")
    most = max(asked.length, asked.prompt_tokens + len(start))
    kept = [prompt for prompt in found if 0 < len(prompt.ids) <= most]
    if not kept:
        raise LinearizeError(f"{source}: none of {len(found):,} prompts has 1 to {most:,} tokens. Raise length")
    return kept


class Author:
    """A model that writes batches of texts, from prompts of one padded width, in a cache that is made once."""

    def __init__(self, model: Any, tokenizer: Any, asked: OwnText, width: int, length: int, batch: int) -> None:
        self.model, self.width, self.length, self.batch = model, width, length, batch
        self.ends = end_tokens(model, tokenizer) if asked.stop == "end" else []
        self.pad = end_token(tokenizer)
        self.style = GenerationConfig(
            do_sample=True,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=0,
            eos_token_id=self.ends or None,
            pad_token_id=self.pad,
        )
        check_width(model, width, length)
        self.cache: Any = StaticCache(config=model.config.get_text_config(), max_cache_len=width + length)

    def write(self, prompts: Sequence[list[int]], seed: int) -> list[tuple[list[int], bool]]:
        """What the model writes behind each prompt, and whether it ended it; of fewer prompts than a batch the first
        stands in for the rest."""
        full = [*prompts, *[prompts[0]] * (self.batch - len(prompts))]
        device = self.model.device
        ids = torch.tensor([[self.pad] * (self.width - len(p)) + p for p in full], device=device)
        mask = torch.tensor([[0] * (self.width - len(p)) + [1] * len(p) for p in full], device=device)
        self.cache.reset()
        before, self.model.generation_config = self.model.generation_config, self.style
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []), quiet(), step_attention(self.model):
                torch.manual_seed(seed)
                made = self.model.generate(
                    ids, attention_mask=mask, max_new_tokens=self.length, **with_cache(self.model, self.cache)
                )
        finally:
            self.model.generation_config = before
        rows = made[: len(prompts), self.width :].tolist()
        ends = [first_end(row, self.ends) for row in rows]
        return [(row[:end], end is not None) for row, end in zip(rows, ends, strict=True)]


def check_width(model: Any, width: int, length: int) -> None:
    """Raise LinearizeError (exit 2) for more tokens than a model takes."""
    most = most_tokens(model)
    if most is not None and width + length > most:
        raise LinearizeError(
            f"data.train.teacher: prompts have up to {width} tokens, length is {length}, and the teacher takes "
            f"{most} tokens. Set length to {max(most - width, 2)}, or less"
        )


def write_own_text(
    model: Any,
    tokenizer: Any,
    asked: OwnText,
    source: TextSource | None,
    folder: Path,
    seed: int,
    say: Callable[[str], None],
    autocast: Callable[[], Any] = contextlib.nullcontext,
) -> None:
    """Write the shards that are missing. Raises LinearizeError: 2 for prompts, 3 for a model without a chat template, 4
    for a disk, 6 for a teacher that writes nothing."""
    written = tokens_from(folder, 0)
    if written >= asked.tokens:
        return
    prompts = find_prompts(asked, source, tokenizer)
    check_tokens(model, max(token for prompt in prompts for token in prompt.ids))
    width = -(-max(len(prompt.ids) for prompt in prompts) // 8) * 8
    chat = asked.prompts == CHAT
    length = min(asked.length, QUESTION) if chat else asked.length
    answer_width = -(-(width + QUESTION + 64) // 8) * 8 if chat else 0
    batch = batch_of(folder, model, asked, max(width + length, answer_width + asked.length))
    author = Author(model, tokenizer, asked, width, length, batch)
    answerer = Author(model, tokenizer, asked, answer_width, asked.length, batch) if chat else None
    began, first, empty = time.perf_counter(), written, 0
    with torch.no_grad(), progress("the teacher's text", asked.tokens) as advance, autocast():
        advance(written)
        while written < asked.tokens:
            number = len(shards_of(folder))
            chosen = [prompts[(number * batch + row) % len(prompts)] for row in range(batch)]
            made = author.write([prompt.ids for prompt in chosen], hashed_generator(seed, number).initial_seed())
            if answerer is None:
                rows = [row_of(tokenizer, *pair) for pair in zip(chosen, made, strict=True)]
            else:
                rows = answered(tokenizer, answerer, made, hashed_generator(seed, -1 - number).initial_seed())
            rows = [row for row in rows if row["tokens"]]
            empty = 0 if rows else empty + 1
            if empty == EMPTY:
                remedy = (
                    "give prompts in a file" if chat else "choose other prompts, or set data.train.teacher.stop=never"
                )
                message = f"the teacher wrote nothing in {EMPTY} batches of {batch}: {remedy}"
                raise LinearizeError(message, Exit.CHECK_FAILED)
            write_atomically(folder / f"{number:05d}.jsonl", "".join(json.dumps(row) + "\n" for row in rows) + "\n")
            new = tokens_from(folder, number)  # also of later ones, where one in between was lost
            advance(min(new, asked.tokens - written))
            written += new
    if model.device.type == "cuda":  # compiled steps hold memory that training needs
        vars(model).pop("_compiled_call", None)
        torch.compiler.reset()
        torch.cuda.empty_cache()
    rate = (written - first) / (time.perf_counter() - began)
    say(f"the teacher wrote {short(written - first)} tokens, {rate:,.0f} a second, into {folder}")


def answered(tokenizer: Any, author: Author, made: list[tuple[list[int], bool]], seed: int) -> list[dict[str, Any]]:
    """Rows of the questions that came to an end, with their answers."""
    chosen = []
    for ids, ended in made:
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()
        messages: list[Message] = [{"role": "user", "content": text}]
        prompt = Prompt(prompt_ids(tokenizer, messages, "the teacher's question"), [], messages)
        if ended and text and len(prompt.ids) <= author.width:
            chosen.append(prompt)
    answers = author.write([prompt.ids for prompt in chosen], seed) if chosen else []
    return [row_of(tokenizer, *pair) for pair in zip(chosen, answers, strict=True)]


def row_of(tokenizer: Any, prompt: Prompt, made: tuple[list[int], bool]) -> dict[str, Any]:
    """A text or a conversation as a line of jsonl. Special tokens of a text stay: read again, they are the same."""
    ids, ended = made
    plain = prompt.messages is None
    text = tokenizer.decode(prompt.shown + ids, skip_special_tokens=not plain, clean_up_tokenization_spaces=False)
    facts = {"tokens": len(ids), "ended": ended}
    if prompt.messages is None:
        return {"text": text, **facts}
    return {"messages": [*prompt.messages, {"role": "assistant", "content": text}], **facts}


def shards_of(folder: Path) -> list[Path]:
    """The shards from the first to the last before one that is missing."""

    def there() -> Iterator[Path]:
        number = 0
        while (path := folder / f"{number:05d}.jsonl").is_file():
            yield path
            number += 1

    return [*there()]


def tokens_from(folder: Path, number: int) -> int:
    """The tokens of all shards from that number on."""
    return sum(row["tokens"] for shard in shards_of(folder)[number:] for row in rows_in(shard))


def rows_in(shard: Path) -> list[dict[str, Any]]:
    """The rows of a shard. Raises LinearizeError (exit 2) for one that is damaged."""
    with undamaged(shard, "Delete it, and it is written again"):
        text = shard.read_text("utf-8")
        if text != "\n" and not text.endswith("\n\n"):
            raise ValueError("its end is missing")
        rows = [json.loads(line) for line in text.split("\n") if line]
        for row in rows:
            if type(row["tokens"]) is not int or not isinstance(row.get("text", row.get("messages")), str | list):
                raise TypeError("a row without a text and its number of tokens")
    return rows


def batch_of(folder: Path, model: Any, asked: OwnText, width: int) -> int:
    """Texts at a time: as in the shards that are there, as asked for, or as many as fit the device's memory."""
    record = folder / BATCH
    if record.is_file():
        with undamaged(record, f"Delete {folder}, and its text is written again"):
            batch = int(json.loads(record.read_text("utf-8"))["batch"])
            if batch < 1:
                raise ValueError(f"a batch of {batch}")
            return batch
    batch = min(asked.batch or fitting(model, width), -(-asked.tokens // asked.length))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(record, json.dumps({"batch": batch}))
    return batch


def fitting(model: Any, width: int) -> int:
    """How many texts of so many tokens the free memory of a GPU holds at a time, up to LARGEST; few on a CPU."""
    if model.device.type != "cuda":
        return ON_CPU
    ids = torch.zeros(1, 8, dtype=torch.long, device=model.device)
    with torch.no_grad():
        layers = cache_of(model(input_ids=ids, use_cache=True)).layers
    a_token = sum(held_bytes(vars(layer)) for layer in layers) / ids.numel()
    a_text = a_token * width + LOGITS * model.config.get_text_config().vocab_size
    count = int(SHARE * torch.cuda.mem_get_info(model.device)[0] / a_text)
    return max(1, min(LARGEST, count // 64 * 64 or count))
