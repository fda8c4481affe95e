"""A Llama in the form of a Qwen3: its weights under Qwen3's names, healed by KL from the Llama itself.

    python -m benchmarks.qwen3_demo OUT                                 # of the demo: 1.5 minutes of one core
    python -m benchmarks.qwen3_demo OUT LLAMA TEXTS.jsonl [STEPS]       # of another, on a GPU where there is one

Qwen3 normalises the queries and keys of each head, which a Llama does not. Norms begin with the mean size of what they
normalise; then all weights learn the Llama's distribution.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from linearize.demo import model_folder
from linearize.demo.corpus import documents

# Rows and tokens of a step, steps and learning rate; and those of a real model.
DEMO, REAL = (4, 256, 100, 3e-4), (8, 2048, 300, 3e-4)


def qwen3_of(llama: Any, ids: Tensor) -> Any:
    """The weights of a Llama in a Qwen3, its norms as large as queries and keys are on tokens [B,T]."""
    known = llama.config.to_dict()
    sizes = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "num_key_value_heads", "max_position_embeddings", "rope_parameters", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "pad_token_id",
    }  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**{name: known[name] for name in sizes}))
    model.to(ids.device).load_state_dict(llama.state_dict(), strict=False)
    seen: dict[str, Tensor] = {}
    for layer, block in enumerate(llama.model.layers):
        for name in "qk":
            projection = getattr(block.self_attn, f"{name}_proj")
            key = f"model.layers.{layer}.self_attn.{name}_norm.weight"
            projection.register_forward_hook(lambda module, given, out, key=key: seen.update({key: out}))
    llama(ids)
    sizes_of = {key: x.unflatten(-1, (-1, known["head_dim"])).square().mean(-1).sqrt() for key, x in seen.items()}
    model.load_state_dict(
        {key: x.mean().expand(known["head_dim"]).clone() for key, x in sizes_of.items()}, strict=False
    )
    return model


def main(out: str, source: str = "", texts: str = "", steps: str = "") -> int:
    torch.manual_seed(0)
    folder = source or model_folder()
    rows, length, count, rate = REAL if source else DEMO
    count = int(steps or count)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if source:
        with Path(texts).open(encoding="utf-8") as lines:
            read, needed = [], count * rows * length
            for line in lines:
                read += [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
                if len(read) > needed:
                    break
        tokens = torch.tensor(read)
    else:
        tokens = torch.tensor([i for d in documents("train")[::8] for i in tokenizer(d.text)["input_ids"]])
    llama = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    with torch.no_grad():
        model = qwen3_of(llama, tokens[None, :length].to(device))
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, count, pct_start=0.1)
    half = torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()
    for step in range(count):
        starts = torch.randint(len(tokens) - length, (rows, 1))
        total = 0.0
        for ids in tokens[starts + torch.arange(length)].split(4):
            ids = ids.to(device)
            with torch.no_grad(), half:
                wanted = llama(ids).logits
            with half:
                found = model(ids).logits
            wanted, found = wanted.float().log_softmax(-1), found.float().log_softmax(-1)
            loss = (wanted.exp() * (wanted - found)).sum(-1).mean() * len(ids) / rows
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == count - 1:
            print(f"step {step}: KL {total:.4f}", flush=True)
    model.to(torch.bfloat16 if source else torch.float32).save_pretrained(Path(out))
    tokenizer.save_pretrained(Path(out))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
