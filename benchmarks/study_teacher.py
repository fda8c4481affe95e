"""Pretrain the study's teacher, a Llama of 26M parameters, for so many steps or seconds on all GPUs of the launch.

torchrun --standalone --nproc-per-node 2 -m benchmarks.study_teacher --text TEXT --out TEACHER --steps 6000

With `--steps` the rows of every step and its learning rate follow from the seed and the number of processes, so a
second run makes the same teacher, to the bit on a CPU. With `--seconds` they follow the clock. teacher.json has the
steps.

TEXT is the folder of benchmarks.study_text, which may still be at work: compiling begins without it. Blocks cross
documents, and so does attention; each document begins with bos.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.train_teacher import loss_of

from .study_text import LENGTH, VOCABULARY

WARMUP = 200  # steps
EVERY = 20  # steps between looks at the clock, which wait for the device
TAIL = 12.0  # seconds kept for evaluation and saving


def causal(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """Plain causal attention, whatever the positions: no mask keeps the fastest kernel."""
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=options["scaling"])
    return o.transpose(1, 2).contiguous(), None


def build(arguments: argparse.Namespace) -> LlamaForCausalLM:
    """Eight layers, 8 query and 4 key heads of 64, rotary positions, tied embeddings, unless told otherwise."""
    AttentionInterface.register("study", causal)
    heads = arguments.hidden // 64
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 5 // 2,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=64,
        max_position_embeddings=arguments.long,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    config._attn_implementation = "study"
    return LlamaForCausalLM(config)


def blocks(tokens: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Blocks from anywhere in the text, [rows, length] int64."""
    starts = torch.randint(len(tokens) - length, (rows, 1), generator=generator, device=tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


def lengths(arguments: argparse.Namespace, step: int) -> tuple[int, int]:
    """Rows and length of a step's blocks: every fourth step has long ones."""
    length = arguments.long if step % 4 == 3 else arguments.block
    return max(1, arguments.rows * arguments.block // length), length


def add_up(model: torch.nn.Module, extra: Tensor) -> Tensor:
    """Mean gradients over processes in one message; `extra` [n] travels along and comes back as a mean."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), extra])
    if dist.is_initialized():
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()
    return flat[offset:]


def share(passed: float, seconds: float, device: str) -> float:
    """How much of the time is over: by the clock of the first process, so that all stop after the same step."""
    gone = torch.tensor([passed / seconds], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.broadcast(gone, 0)
    return gone.item()


def load_tokens(path: Path, flag: Path, device: str) -> Tensor:
    while not flag.exists():
        time.sleep(0.2)
    return torch.from_numpy(np.load(path).astype(np.int32)).to(device)


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, tokens: Tensor, length: int) -> float:
    """exp of the mean loss over blocks of `length` of at most 2M tokens, in bf16 on a GPU."""
    rows = tokens[: min(len(tokens), 2_000_000) // length * length].view(-1, length).long()
    total = 0.0
    for part in rows.split(max(1, 32768 // length)):
        total += float(loss_of(model, {"input_ids": part}, part.is_cuda)) * len(part)
    return math.exp(total / len(rows))


def train(arguments: argparse.Namespace, device: str, rank: int, world: int) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Train until the steps, or the time, are over; the model and what there is to know about the run."""
    torch.manual_seed(arguments.seed)
    model = build(arguments)
    torch.nn.Module.to(model, device)
    on_gpu = device != "cpu"
    step_loss = torch.compile(loss_of, dynamic=False) if on_gpu else loss_of
    generator = torch.Generator(device).manual_seed(arguments.seed * 1000 + rank)
    noise = torch.randint(VOCABULARY, (100_000,), device=device)
    for step in (0, 3) if on_gpu else ():  # compiles both lengths while the text is being read
        step_loss(model, {"input_ids": blocks(noise, *lengths(arguments, step), generator)}, on_gpu).backward()
    model.zero_grad()
    say(rank, f"compiled after {time.time() - arguments.began:.0f} s")
    tokens = load_tokens(arguments.text / "teacher.npy", arguments.text / "text.json", device)
    say(rank, f"{len(tokens):,} tokens of text after {time.time() - arguments.began:.0f} s")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=arguments.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    step, seen, gone, curve = 0, 0, 0.0, []
    began, seconds = time.time(), arguments.began + (arguments.seconds or 0.0) - TAIL - time.time()
    model.train()
    while gone < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * min((step + 1) / WARMUP, 1.0 - gone)
        rows, length = lengths(arguments, step)
        loss = step_loss(model, {"input_ids": blocks(tokens, rows, length, generator)}, on_gpu)
        loss.backward()
        (mean_loss,) = add_up(model, loss.detach()[None])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        step, seen = step + 1, seen + rows * length * world
        if arguments.steps is not None:
            gone = step / arguments.steps
        elif step % EVERY == 0:
            mean_loss.item()  # waits for the device
            gone = share(time.time() - began, seconds, device)
        if step % 100 == 0:
            curve.append({"step": step, "tokens": seen, "loss": round(mean_loss.item(), 4)})
            say(rank, f"{curve[-1]} {seen / (time.time() - began):,.0f} tokens/s")
    facts = {"tokens": seen, "steps": step, "seconds": round(time.time() - arguments.began, 1), "curve": curve}
    return model, {**facts, "text_tokens": len(tokens), "gpus": world if on_gpu else 0}


def steps_of(text: str) -> int:
    """A number of steps. Raises ValueError for none."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=steps_of, help="optimizer steps: the same teacher each time")
    budget.add_argument("--seconds", type=float, help="from --began to the saved model")
    parser.add_argument("--began", type=float, default=time.time(), help="when the clock began, in Unix seconds")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--long", type=int, default=LENGTH, help="length of the blocks of every fourth step")
    parser.add_argument("--rows", type=int, default=64, help="blocks of a step and GPU")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    if world > 1:
        dist.init_process_group("nccl" if device != "cpu" else "gloo")
    if device != "cpu":
        torch.cuda.set_device(device)
    model, facts = train(arguments, device, rank, world)
    if rank == 0:
        heldout = load_tokens(arguments.text / "heldout.npy", arguments.text / "text.json", device)
        model.bfloat16()
        model.config._attn_implementation = "sdpa"
        model.save_pretrained(arguments.out)
        model.config._attn_implementation = "study"
        AutoTokenizer.from_pretrained(arguments.text / "tokenizer").save_pretrained(arguments.out)
        weights = (arguments.out / "model.safetensors").read_bytes()
        facts |= {"parameters": model.num_parameters(), "sha256": hashlib.sha256(weights).hexdigest()}
        for length in sorted({512, 1024, LENGTH, arguments.long}):
            facts[f"heldout_ppl_{length}"] = round(perplexity(model.eval(), heldout, length), 4)
        facts["hardware"] = torch.cuda.get_device_name() if device != "cpu" else "CPU"
        facts["text"] = json.loads((arguments.text / "text.json").read_text())
        (arguments.out / "teacher.json").write_text(json.dumps(facts, indent=1))
        say(rank, json.dumps({k: v for k, v in facts.items() if k not in ("curve", "text")}))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
