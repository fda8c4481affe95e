"""Which layers to keep: perplexity with one layer converted and nothing trained, over the teacher's.

python -m benchmarks.layers MODEL TEXT.jsonl --mechanism gsa --set slots=128 --set window=64 --set clock=0
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.convert import plan_conversion
from linearize.plan.mechanisms import load_mechanism, parse_settings
from linearize_kernels.hf.attention_hooks import attach

from .window import perplexity

CHARACTERS = 8000  # of each document


def read(model: str, text: Path, tokens: int, length: int) -> Tensor:
    """The beginnings of documents in blocks [.., length], `tokens` in all."""
    tokenizer = AutoTokenizer.from_pretrained(model, model_max_length=10**9)
    ids: list[int] = []
    with text.open() as lines:
        while len(ids) < tokens:
            ids += tokenizer(json.loads(next(lines))["text"][:CHARACTERS])["input_ids"]
    return torch.tensor(ids[: tokens // length * length]).view(-1, length)


def load(model: str) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--mechanism", default="gsa")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=1024)
    arguments = parser.parse_args()
    ids, teacher = read(arguments.model, arguments.text, arguments.tokens, arguments.length), load(arguments.model)
    ids = ids.to(teacher.device)
    source = perplexity(teacher, ids)
    print(f"teacher {source:.3f}", flush=True)
    for layer in range(teacher.config.num_hidden_layers):
        model, options = load(arguments.model), parse_settings(arguments.settings)
        plan, _, _ = plan_conversion(arguments.model, arguments.mechanism, layers=str(layer), options=options)
        attach(model, plan.spec(), {arguments.mechanism: load_mechanism(arguments.mechanism)})
        model.to(teacher.device)
        print(f"layer {layer}: {perplexity(model, ids) / source:.4f}", flush=True)


if __name__ == "__main__":
    main()
