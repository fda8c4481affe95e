"""Converted models in vLLM on a GPU, beside transformers: `PYTHONPATH=tests:tests/serve python tests/gpu/serving.py`.

One model has every causal mechanism, layer by layer, so that few engines are started: all linear, and with kept layers
and heads. 32 ragged requests come in random order, memory full of NaN; long prompts in parts (`whole`: another engine
reads them at once); three of them alone. `prefix`: prompts that begin alike, and prefix caching. `fp8`: weights of 8
bits, whose distance from float32 is printed and not judged.
The log-probabilities that an engine writes in bf16 may be as far from float32 as transformers' own in bf16 are.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import engines
import torch
import transformers
from engines import Case, converted, engine, fill_with_nan, prompts_of, state_layers, write
from torch import Tensor

# All heads of 64, as kernels for GPUs take them.
WIDE = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE |= {"initializer_range": 0.05}
WHOLE, PREFIX, FP8 = (word in sys.argv for word in ("whole", "prefix", "fp8"))
ALL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gsa", {}), ("gdn", {}), ("gla", {}), ("retnet", {}), ("la", {}), ("mhla", {"block_size": 16, "blocks": 4}),
    ("sla", {"base": "gla"}), ("sla", {"base": "gdn"}), ("sla", {"base": "retnet"}), ("gdn", {"faithful": True}),
    ("gsa", {"window": 16, "sink": 2}), ("gla", {"window": 16}), ("gdn", {"window": 16, "sink": 1}),
    ("la", {"feature_map": "hedgehog", "window": 16}), ("window", {"window": 24, "sink": 4}),
    ("gsa", {"slots": 64, "norm": "hidden", "output_act": "swish"}),
)  # fmt: skip
CASES: dict[str, tuple[Any, ...]] = {
    "all linear": ALL,
    "hybrid": (None, *ALL[:6], None, ("gla", {"heads": "0"}), *ALL[10:13], None),
    "gdn": (("gdn", {"window": 16}),) * 4,
    "gsa": (("gsa", {"window": 16}), ("gsa", {"slots": 128, "state_heads": "query", "clock": 0, "window": 16})) * 2,
    "gla": (("gla", {}),) * 4,
}


def folder_of(name: str, place: Path) -> Path:
    layers = CASES[name]
    engines.SMALL.update(WIDE, num_hidden_layers=len(layers))
    return converted(place, Case("llama", layers))


@torch.no_grad()
def judged(model: Any, outputs: list[Any]) -> list[Tensor]:
    """The log-probabilities of what was written for each prompt, by a model."""
    found = []
    for output in outputs:
        prompt, new = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        ids = torch.tensor([prompt + new], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu())
    return found


def written(outputs: list[Any]) -> list[Tensor]:
    found = []
    for one in (output.outputs[0] for output in outputs):
        steps = zip(one.logprobs, one.token_ids, strict=True)
        found.append(torch.tensor([step[token].logprob for step, token in steps]))
    return found


def off(found: list[Tensor], exact: list[Tensor]) -> float:
    """The root mean square of all differences."""
    return float((torch.cat(found) - torch.cat(exact)).square().mean().sqrt())


def with_prefix(llm: Any, prompts: list[list[int]], result: dict[str, Any]) -> list[Any]:
    """Prompts behind the same blocks of tokens: the first alone, the others together, some of them again."""
    block = llm.llm_engine.vllm_config.cache_config.mamba_block_size
    (common,) = prompts_of((2 * block + 37,), seed=9)
    fill_with_nan(llm)
    outputs = write(llm, [common + prompts[0]], 24)
    again = write(llm, [common + prompt for prompt in prompts[:14]], 24)
    again += write(llm, [common + prompt for prompt in prompts[14:16]], 24)
    result["block"], result["cached"] = block, [output.num_cached_tokens for output in again]
    if min(result["cached"]) < block:
        result["bad"].append("nothing was cached")
    return outputs + again


def check(name: str, place: Path, eager: bool) -> dict[str, Any]:
    """Figures of one case; `bad` names what is further from float32 than it may be."""
    folder = folder_of(name, place)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load = transformers.AutoModelForCausalLM.from_pretrained
    exact = load(folder, trust_remote_code=True, dtype=torch.float32).to(device).eval()
    half = load(folder, trust_remote_code=True, dtype=torch.bfloat16).to(device).eval()
    chance = random.Random(2)
    prompts = prompts_of((1, 1, 2, 300, *(chance.randint(1, 200) for _ in range(28))))
    chance.shuffle(prompts)
    result: dict[str, Any] = {"case": name, "eager": eager, "bad": []}
    # Prompts are read in parts where they are long, whole where they are short, and some requests give way to others.
    graphs = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}
    for way, settings in (("parts", {"max_num_batched_tokens": 128}), ("whole", {"max_num_batched_tokens": 1024})):
        if way == "whole" and not WHOLE:
            continue
        start = time.time()
        settings |= {"dtype": "bfloat16", "enforce_eager": eager, "max_num_seqs": 16, "gpu_memory_utilization": 0.1}
        settings["kv_cache_memory_bytes"] = 2 << 30
        if PREFIX:
            settings |= {"enable_prefix_caching": True, "max_num_batched_tokens": 4096, "max_model_len": 8192}
            settings["hf_overrides"] = {"max_position_embeddings": 8192}
        if FP8:
            settings["quantization"] = "fp8"
        with engine(folder, **settings, **graphs) as llm:
            result[f"{way}: start"] = round(time.time() - start, 1)
            assert len(state_layers(llm)) == sum(layer is not None for layer in CASES[name])
            if PREFIX:
                outputs = with_prefix(llm, prompts, result)
            else:
                fill_with_nan(llm)
                outputs = write(llm, prompts, 24)
                fill_with_nan(llm)
                outputs += [one for prompt in prompts[:3] for one in write(llm, [prompt], 24)]
        reference = judged(exact, outputs)
        ours, own = off(written(outputs), reference), off(judged(half, outputs), reference)
        result[way] = [round(ours, 5), round(own, 5)]
        if not ours <= 1.5 * own + 1e-3 and not FP8:
            result["bad"].append(way)
    return result


def main() -> None:
    names = [name for name in sys.argv[1:] if name in CASES] or list(CASES)
    eager = "eager" in sys.argv
    bad = False
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            result = check(name, Path(place), eager)
        bad |= bool(result["bad"])
        print("SERVING", json.dumps(result), flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
