"""Pretrain the demo model: `python -m benchmarks.train_teacher --out linearize/demo/model`.

A Llama of 3.6 M parameters and its tokenizer, trained from nothing on the demo corpus. Minutes on one GPU.
"""

from __future__ import annotations

import argparse
import csv
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.demo_tokenizer import BOS, EOS, train_tokenizer
from linearize.demo.corpus import HELD_OUT, Document, documents


@dataclass(frozen=True)
class Options:
    """How to train; each field is an option of the command line."""

    steps: int = 9000
    batch_tokens: int = 32_768
    block: int = 512
    long_block: int = 2048  # every eighth step, so that the later positions are trained too
    lr: float = 3e-3
    warmup: int = 300
    weight_decay: float = 0.5
    dropout: float = 0.1
    vocab_size: int = 2048
    eval_every: int = 500
    patience: int = 6  # evaluations without a better held-out perplexity before training stops
    seed: int = 0


@dataclass(frozen=True)
class Point:
    """One row of `curve.csv`."""

    step: int
    tokens: int
    train_loss: float
    heldout_ppl: float


@dataclass(frozen=True)
class Stream:
    """Documents end to end; `starts` holds, for each token, where its document begins."""

    tokens: torch.Tensor
    starts: torch.Tensor

    def blocks(self, offsets: torch.Tensor, length: int) -> dict[str, torch.Tensor]:
        """The blocks at `offsets` as a model's inputs; documents in one block do not see each other."""
        index = offsets[:, None] + torch.arange(length, device=offsets.device)
        starts = self.starts[index]
        same_document = starts[:, None, :, None] == starts[:, None, None, :]
        return {
            "input_ids": self.tokens[index],
            "position_ids": index - torch.maximum(starts, offsets[:, None]),
            "attention_mask": same_document.tril(),
        }


def encode(tokenizer: PreTrainedTokenizerFast, corpus: Sequence[Document], device: str) -> Stream:
    """The corpus as one stream: bos, text, eos, document after document."""
    rows = tokenizer([document.text + EOS for document in corpus], verbose=False)["input_ids"]
    lengths = torch.tensor([len(row) for row in rows])
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    tokens = torch.tensor([token for row in rows for token in row])
    return Stream(tokens.to(device), starts.to(device))


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The demo's architecture: grouped queries, rotary positions and tied embeddings, as in real Llamas."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=416,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=tokenizer.model_max_length,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Dropout on what each sublayer adds to the residual stream, which Llama itself has no setting for."""
    for layer in model.model.layers:
        for sublayer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            sublayer.register_forward_hook(lambda module, _, out: F.dropout(out, rate, module.training))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], bf16: bool) -> torch.Tensor:
    """Mean next-token loss, with or without bf16 autocast."""
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=bf16):
        logits = model(**batch, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten())


@torch.no_grad()
def perplexity(model: nn.Module, stream: Stream, length: int, every: int = 1, bf16: bool = False) -> float:
    """Token-level perplexity over non-overlapping blocks of `length` (one in `every`), less a short tail."""
    was_training = model.training
    model.eval()
    end = len(stream.tokens) - length + 1
    offsets = torch.arange(0, end, every * length, device=stream.tokens.device)
    rows = max(1, 16_384 // length)
    losses = [loss_of(model, stream.blocks(part, length), bf16) * len(part) for part in offsets.split(rows)]
    model.train(was_training)
    return math.exp(torch.stack(losses).sum().item() / len(offsets))


def batches(data: Stream, options: Options) -> Iterator[dict[str, torch.Tensor]]:
    """Blocks from anywhere in the stream; every eighth batch has fewer, longer ones."""
    device = data.tokens.device
    generator = torch.Generator(device).manual_seed(options.seed)
    for step in range(options.steps):
        length = options.long_block if step % 8 == 7 else options.block
        rows = options.batch_tokens // length
        last = len(data.tokens) - length
        yield data.blocks(torch.randint(last + 1, (rows,), generator=generator, device=device), length)


def train(model: LlamaForCausalLM, data: Stream, heldout: Stream, options: Options) -> list[Point]:
    """Train `model` in place and leave it at its best held-out perplexity; the whole curve."""
    add_dropout(model, options.dropout)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=options.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / options.warmup, 0.5 + 0.5 * math.cos(math.pi * step / options.steps)),
    )
    on_gpu = data.tokens.device.type == "cuda"
    step_loss = torch.compile(loss_of, dynamic=False) if on_gpu else loss_of
    curve: list[Point] = []
    best, best_weights = math.inf, model.state_dict()
    evals_since_best = 0
    total = torch.zeros((), device=data.tokens.device)
    model.train()
    for step, batch in enumerate(batches(data, options), start=1):
        loss = step_loss(model, batch, on_gpu)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % options.eval_every and step != options.steps:
            continue
        steps = step - (curve[-1].step if curve else 0)
        ppl = perplexity(model, heldout, options.block, bf16=on_gpu)
        curve.append(Point(step, step * options.batch_tokens, total.item() / steps, ppl))
        total.zero_()
        print(curve[-1], flush=True)
        evals_since_best += 1
        if ppl < best:
            best, evals_since_best = ppl, 0
            best_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        if evals_since_best == options.patience:
            break
    model.load_state_dict(best_weights)
    return curve


CARD = """\
# The demo model

A small Llama ({parameters:,} parameters) pretrained from nothing on the text that every CPython carries: the
sources of its standard library and the topics of pydoc, and for this model its test suite as well. It writes
text that looks like Python. It is here so that a conversion can be tried in minutes, offline, with a
perplexity that means something; it is good for nothing else.

| | |
| --- | --- |
| command | `{command}` |
| date | {date} |
| hardware | {hardware}, torch {torch}, {seconds:.0f} s |
| training text | {source}, tests included: {documents:,} documents, {characters:,} characters |
| its tokens | {unique:,} |
| **teacher tokens** | **{tokens:,}**: {steps:,} steps of {batch_tokens:,}, {epochs:.1f} times the text |
| held out | {held_out}, their tests, and one pydoc topic in ten |
| held-out text | {heldout:,} tokens, tests not included |
| **held-out perplexity** | **{ppl:.4f}** a token over blocks of {block} ({bits:.4f} bits a byte) |
| over blocks of {long_block} | {long_ppl:.4f} |

The perplexities are those of the weights as shipped (bf16), computed in float32. `curve.csv` holds the
training curve: its last row is not always its best, and the weights are those of the best. Every text is
encoded as `{bos}`, its tokens and `{eos}`; blocks cross documents, but attention and positions do not.
An eighth of the steps trained on blocks of {long_block} tokens, the rest on blocks of {block}.

The training text is CPython's, under the PSF License, version 2.
"""


def write_card(out: Path, options: Options, curve: list[Point], facts: dict[str, Any]) -> None:
    """`README.md` and `curve.csv`; `facts` are what only the run knows."""
    best = min(curve, key=lambda point: point.heldout_ppl)
    card = CARD.format(
        date=date.today().isoformat(),
        torch=torch.__version__,
        held_out=", ".join(HELD_OUT),
        bos=BOS,
        eos=EOS,
        steps=best.step,
        tokens=best.tokens,
        epochs=best.tokens / facts["unique"],
        batch_tokens=options.batch_tokens,
        block=options.block,
        long_block=options.long_block,
        **facts,
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    with (out / "curve.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Point))
        writer.writerows((p.step, p.tokens, f"{p.train_loss:.4f}", f"{p.heldout_ppl:.4f}") for p in curve)


def run(out: Path, dump: Path | None, options: Options, command: str) -> None:
    """Train the tokenizer and the model, and write both to `out` with their curve and card."""
    began = time.monotonic()
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus, heldout_corpus = documents("train", tests=True, dump=dump), documents("heldout", dump=dump)
    texts = [document.text for document in corpus]
    tokenizer = train_tokenizer(texts, options.vocab_size, options.long_block)
    data, heldout = encode(tokenizer, corpus, device), encode(tokenizer, heldout_corpus, device)
    model = build_model(tokenizer)
    nn.Module.to(model, device)
    curve = train(model, data, heldout, options)
    seconds = time.monotonic() - began
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)

    shipped = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    nn.Module.to(shipped, device)
    ppl = perplexity(shipped, heldout, options.block)
    heldout_bytes = sum(len(document.text.encode()) for document in heldout_corpus)
    facts = {
        "command": command,
        "hardware": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU",
        "seconds": seconds,
        "source": dump.stem if dump else f"cpython-{platform.python_version()}",
        "documents": len(texts),
        "characters": sum(map(len, texts)),
        "unique": len(data.tokens),
        "heldout": len(heldout.tokens),
        "parameters": shipped.num_parameters(),
        "ppl": ppl,
        "bits": math.log2(ppl) * len(heldout.tokens) / heldout_bytes,
        "long_ppl": perplexity(shipped, heldout, options.long_block),
    }
    write_card(out, options, curve, facts)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="train_teacher", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dump", type=Path, help="a corpus from another machine, by corpus.write_dump")
    for field in fields(Options):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default)
    values = vars(parser.parse_args())
    command = shlex.join(["python", "-m", "benchmarks.train_teacher", *sys.argv[1:]])
    run(values.pop("out"), values.pop("dump"), Options(**values), command)


if __name__ == "__main__":
    main()
