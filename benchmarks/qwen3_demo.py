"""A Llama in the form of a Qwen3: its weights under Qwen3's names, healed by KL from the Llama itself.

    python -m benchmarks.qwen3_demo OUT                                 # of the demo: 1.5 minutes of one core

Qwen3 normalises the queries and keys of each head, which a Llama does not. Norms begin with the mean size of what they
normalise; then all weights learn the Llama's distribution.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from linearize.demo import model_folder
from linearize.demo.corpus import documents

ROWS, LENGTH, STEPS, RATE = 4, 256, 100, 3e-4  # rows and tokens of a step, steps and learning rate


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


def main(out: str) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    tokens = torch.tensor([i for d in documents("train")[::8] for i in tokenizer(d.text)["input_ids"]])
    llama = LlamaForCausalLM.from_pretrained(model_folder(), dtype=torch.float32).eval()
    with torch.no_grad():
        model = qwen3_of(llama, tokens[None, :LENGTH])
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    for step in range(STEPS):
        ids = tokens[torch.randint(len(tokens) - LENGTH, (ROWS, 1)) + torch.arange(LENGTH)]
        with torch.no_grad():
            wanted = llama(ids).logits.log_softmax(-1)
        loss = (wanted.exp() * (wanted - model(ids).logits.log_softmax(-1))).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step}: KL {loss.item():.4f}", flush=True)
    model.save_pretrained(Path(out))
    tokenizer.save_pretrained(Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
