"""`linearize estimate` beside what a GPU really takes, for the table of docs/cost.md.

    python -m benchmarks.estimate FOLDER           # one GPU of 80 GB or more; a minute or two a model
    python -m benchmarks.estimate FOLDER 8B 135M   # only models in whose names one of these stands
    python -m benchmarks.estimate FOLDER --tiny    # the same on a CPU with small models, which proves this file alone

Eight recipes for models of 0.1B to 8B, and three of long rows: random weights of published shapes, nothing is
downloaded. Each is a process of its own: `estimate --measure` prints the estimate and takes two steps of every stage.
Those that do not fit the card are estimated and not measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rope_theta": 500000.0}
QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128}
LORA = ["stages.logit_kl.train=[lora]", "stages.logit_kl.lora={r: 16, alpha: 32}"]


def shape(family: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, kv: int) -> dict[str, Any]:
    """config.json of a decoder of that size; small ones tie the embeddings."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 32768}
    more = {"tie_word_embeddings": hidden < 3000, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    return {**family, **sizes, **more}


def long_rows(length: int) -> list[str]:
    """A row at a time, and a step of one row."""
    batch = [
        f"stages.{name}.batch={{per_device: 1, gradient_accumulation_steps: 1}}"
        for name in ("attention_transfer", "logit_kl")
    ]
    return [*batch, f"data.pack.seq_len={length}", "runtime.batch=given", "stages.logit_kl.loss.chunk_size=2048"]


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 32768}
MISTRAL |= {"sliding_window": None}
PHI = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 32064, "pad_token_id": 0}
SMOL = LLAMA | {"vocab_size": 49152}
# Of attention transfer, whose activations at 131,072 tokens alone fill a card of 80 GB.
SHORTER = "stages.attention_transfer.data={pack: {seq_len: 32768}}"
# Name -> shape, preset, overrides.
RECIPES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "SmolLM2 135M": (shape(SMOL, 576, 1536, 30, 9, 3), "gsa", ["stages.logit_kl.batch={per_device: 8}"]),
    "Qwen3 0.6B": (shape(QWEN, 1024, 3072, 28, 16, 8), "gsa-window", ["stages.logit_kl.batch={per_device: 4}"]),
    "Llama 3.2 1B": (shape(LLAMA, 2048, 8192, 16, 32, 8), "gsa-window", []),
    "Phi 3.5 mini": (shape(PHI, 3072, 8192, 32, 32, 32), "gla", []),
    "Qwen3 4B": (shape(QWEN, 2560, 9728, 36, 32, 8), "gdn", ["stages.logit_kl.train=[mixer]"]),
    "Mistral 7B": (shape(MISTRAL, 4096, 14336, 32, 32, 8), "gsa-window", LORA),
    "Qwen3 8B": (shape(QWEN, 4096, 12288, 36, 32, 8), "sla", LORA),
    "Llama 3.1 8B": (shape(LLAMA, 4096, 14336, 32, 32, 8), "gsa-window", []),
    "8B, rows of 32,768": (shape(LLAMA, 4096, 14336, 32, 32, 8), "gsa-window", [*LORA, *long_rows(32768)]),
    "8B, rows of 32,768 offloaded": (
        shape(LLAMA, 4096, 14336, 32, 32, 8),
        "gsa-window",
        [*LORA, *long_rows(32768), "runtime.offload_activations=true"],
    ),
    "8B, rows of 131,072": (
        shape(LLAMA, 4096, 14336, 32, 32, 8) | {"max_position_embeddings": 131072},
        "gsa-window",
        [*LORA, *long_rows(131072), "runtime.offload_activations=true", SHORTER],
    ),
}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
TINY = ["data.pack.seq_len=32", "runtime.precision=fp32", "model.dtype=float32"]


def run(place: Path, preset: str, overrides: list[str], measure: bool) -> dict[str, Any]:
    """What `linearize estimate --json` prints; `error` where it failed."""
    command = [sys.executable, "-m", "linearize", "estimate", preset, f"model.base={place}", *overrides, "--json"]
    done = subprocess.run([*command, *["--measure"] * measure], capture_output=True, text=True, timeout=1800)
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.strip().splitlines()[-1]}


def main() -> None:
    folder, tiny = Path(sys.argv[1]), "--tiny" in sys.argv
    wanted = [word for word in sys.argv[2:] if word != "--tiny"] or [""]
    print("| model | recipe | stage | estimated GiB | measured GiB | reserved GiB | estimated tokens/s | measured |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (config, preset, overrides) in RECIPES.items():
        if not any(word in name for word in wanted):
            continue
        place = folder / name.replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(config | (SMALL if tiny else {})))
        given = overrides + TINY * tiny
        found = run(place, preset, given, measure=True)
        if "error" in found:  # it may be too large for the card: then the estimate alone
            print(f"{name}: {found['error']}", file=sys.stderr, flush=True)
            found = run(place, preset, given, measure=False)
        if "error" in found:
            print(f"| {name} | {preset} | {found['error']} | | | | | |", flush=True)
        for row in found.get("stages", ()):
            one = row.get("measured") or {"peak": 0, "reserved": 0, "tokens_per_s": 0}
            sizes = [f"{count / 2**30:.2f}" for count in (row["memory"]["total"], one["peak"], one["reserved"])]
            rates = [f"{rate or 0:,.0f}" for rate in (row["tokens_per_s"], one["tokens_per_s"])]
            print(f"| {name} | {preset} | {row['name']} | {' | '.join([*sizes, *rates])} |", flush=True)


if __name__ == "__main__":
    main()
