"""From random weights, as the papers train: every causal mechanism in its published form and softmax, one shape, the
same rows in the same order.

python -m benchmarks.scratch --text TEXT --work WORK --out rows.jsonl --tokens 6e7 softmax gla gsa@1 "sla base=gla"

TEXT is the folder of benchmarks.study_text. A variant is `softmax` or a mechanism, options behind it; `@1` is another
seed, of weights and rows. Each adds a row of JSON to --out. Processes that share --work share the list; one that would
not end before --seconds is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from linearize import api
from linearize.train.compiled import CompiledLayers
from linearize.train.save import load_whole

from .study import _value, claim, lean
from .study_teacher import blocks, load_tokens
from .study_text import VOCABULARY

WARMUP, FLOOR = 0.05, 0.1  # shares of the steps, and of the learning rate
LENGTHS = (256, 512, 1024, 2048)  # of blocks that perplexity is measured in
HELD_OUT = 1_000_000  # tokens of them


def parse(text: str) -> tuple[str, dict[str, Any], int]:
    """`sla@1 base=gla` -> mechanism, options, seed."""
    name, *changes = text.split()
    name, _, seed = name.partition("@")
    return name, {key: _value(value) for key, _, value in (change.partition("=") for change in changes)}, int(seed or 0)


def build(name: str, options: dict[str, Any], seed: int, arguments: argparse.Namespace, folder: Path) -> Any:
    """A random Llama whose attention is softmax, or converted to a mechanism as its paper has it."""
    shutil.rmtree(folder, ignore_errors=True)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 11 // 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.heads,
        max_position_embeddings=arguments.block,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder / "softmax")
    AutoTokenizer.from_pretrained(arguments.text / "tokenizer").save_pretrained(folder / "softmax")
    if name == "softmax":
        return load_whole(folder / "softmax", torch.float32, False)
    how: dict[str, Any] = {"options": {"faithful": True, **options}, "verify": "none", "seed": seed}
    api.convert(folder / "softmax", name, folder / "linear", **how)
    return load_whole(folder / "linear", torch.float32, True)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def perplexities(model: Any, tokens: Tensor, longest: int) -> dict[str, float]:
    """In blocks of each length."""
    found = {}
    for length in (length for length in LENGTHS if length <= longest):
        rows = tokens[: min(len(tokens), HELD_OUT) // length * length].view(-1, length).long()
        total = 0.0
        for part in rows.split(max(1, 32768 // length)):
            with torch.autocast(part.device.type, torch.bfloat16, enabled=part.is_cuda):
                logits = model(input_ids=part, use_cache=False).logits
            total += float(loss_of(logits, part)) * len(part)
        found[str(length)] = torch.tensor(total / len(rows)).exp().item()
    return found


def trained(model: Any, seed: int, tokens: Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all weights on rows that the seed draws; the loss of the last tenth of the steps, and what it took."""
    device = tokens.device
    lean(model).to(device).train()
    loss_now, layers = loss_of, contextlib.nullcontext
    if device.type == "cuda":
        loss_now, layers = torch.compile(loss_of, dynamic=False), CompiledLayers(model).on
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": arguments.decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(seed)
    steps, losses, began = max(1, arguments.tokens // (arguments.rows * arguments.block)), [], 0.0
    for step in range(steps):
        if step == min(5, steps - 1):  # compiled by now
            began = time.perf_counter() if device.type != "cuda" else _now()
        gone = step / steps
        cosine = FLOOR + (1 - FLOOR) * (1 + torch.tensor(torch.pi * gone).cos().item()) / 2
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * min((step + 1) / max(1, WARMUP * steps), cosine)
        given = blocks(tokens, arguments.rows, arguments.block, generator)
        for part in given.split(arguments.micro):
            with layers():
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    logits = model(input_ids=part, use_cache=False).logits
                loss = loss_now(logits, part) * len(part) / len(given)
                loss.backward()
        losses.append(loss.detach() * len(given) / len(part))
        if step % max(1, steps // 10) == 0:
            print(f"step {step} of {steps}, {time.strftime('%X')}", flush=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    timed = (time.perf_counter() if device.type != "cuda" else _now()) - began
    speed = (steps - min(5, steps - 1)) * arguments.rows * arguments.block / timed
    return {
        "tokens": steps * arguments.rows * arguments.block,
        "steps": steps,
        "loss": torch.stack(losses[-max(1, steps // 10) :]).mean().item(),
        "tokens_per_s": round(speed),
    }


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=lambda text: int(float(text)), required=True, help="of each run")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--block", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16, help="blocks of a step")
    parser.add_argument("--micro", type=int, default=16, help="blocks at a time")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--start", type=float, default=time.time(), help="when the clock began, in Unix seconds")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    flag = arguments.text / "text.json"
    learned, heldout = (load_tokens(arguments.text / f"{part}.npy", flag, device) for part in ("teacher", "heldout"))
    slowest = 0.0
    for text in arguments.variants:
        began = time.time()
        if began + slowest > arguments.start + arguments.seconds:
            print(f"no time for {text}", flush=True)
            continue
        if not claim(text, arguments.work):
            continue
        name, options, seed = parse(text)
        folder = arguments.work / f"model-{text.replace(' ', '-')}"
        model = build(name, options, seed, arguments, folder)
        shutil.rmtree(folder)
        row: dict[str, Any] = {"variant": text, "mechanism": name, "options": options, "seed": seed}
        row["parameters"] = model.num_parameters()
        row |= trained(model, seed, learned, arguments) | {"text_tokens": len(learned)}
        row["perplexity"] = perplexities(model.eval(), heldout, arguments.block)
        row["hardware"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        row["seconds"] = round(time.time() - began, 1)
        slowest = max(slowest, row["seconds"])
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        del model


if __name__ == "__main__":
    main()
