"""Models that want several cards, with FSDP2, for docs/cost.md: speed and memory of the preset gsa-window.

    python -m benchmarks.fsdp FOLDER 8B long 70B   # two GPUs of 80 GB, four for 70B; minutes each; 40 GiB in FOLDER
    python -m benchmarks.fsdp FOLDER 70B --tiny    # the same on a CPU with a small model, which proves this file alone

`8B` trains all weights of Llama 3.1 8B's shape; `long` adds LoRA to it, with a row of 131,072 tokens a process and
offloaded activations; `70B` trains all weights of Llama 3.1 70B's shape, cut to 8 layers. Weights are random. A run is
ended when its last stage has made its steps. The result is JSON on stdout: by stage as in benchmarks.processes, the
peaks of the main process before the first stage, and the most that any card had in use.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from linearize.demo import model_folder
from linearize.recipe.presets import recipe_path

from .estimate import LLAMA, LORA, RECIPES, SMALL, long_rows, shape
from .processes import LAUNCH, entries, rates

LIMIT = 420  # seconds of a run
PROGRAM = ["-m", "linearize"]
STAGES = ("attention_transfer", "logit_kl")
# The command line, which also prints the peaks before the first stage.
PEAKS = """
import sys, torch
from linearize import cli
for card in range(torch.cuda.device_count()):  # 80 GB are what most people have
    share = 79.2 * 2**30 / torch.cuda.get_device_properties(card).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), card)
from linearize.train.session import Finetuner
def log_step(name):
    method = getattr(Finetuner, name)
    def run(self, *arguments):
        found = method(self, *arguments)
        if torch.cuda.is_available() and self.accelerator.is_main_process:
            print("PEAK", name, torch.cuda.max_memory_allocated(), file=sys.stderr, flush=True)
            torch.cuda.reset_peak_memory_stats()
        return found
    setattr(Finetuner, name, run)
for name in ("load", "calibrate", "baseline"):
    log_step(name)
cli.main()
"""


class Case(NamedTuple):
    """`rows` are those of a step, over all processes."""

    config: dict[str, Any]
    processes: int
    steps: int
    length: int
    rows: int
    overrides: tuple[str, ...]


SEVENTY = shape(LLAMA, 8192, 28672, 8, 64, 8)
ONE_ROW = [*LORA, *long_rows(131072), "runtime.offload_activations=true", "data.eval=null", "eval.every_steps=null"]
GIVEN = [
    "runtime.batch=given",
    *(f"stages.{name}.batch={{per_device: 4, gradient_accumulation_steps: 1}}" for name in STAGES),
]
CASES = {
    "8B": Case(RECIPES["Llama 3.1 8B"][0], 2, 8, 2048, 16, ()),
    "long": Case(RECIPES["8B, rows of 131,072"][0], 2, 2, 131072, 2, tuple(ONE_ROW)),
    "70B": Case(SEVENTY, 4, 6, 2048, 16, tuple(GIVEN)),
}


def base(folder: Path, config: dict[str, Any], tiny: bool) -> None:
    """Random weights in bf16 of a Llama's shape, with the tokenizer of the demo model."""
    sizes = {key: value for key, value in config.items() if key not in ("model_type", "dtype", "architectures")}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cpu" if tiny else "cuda"):
        LlamaForCausalLM(LlamaConfig(**(sizes | (SMALL | {"vocab_size": 2048} if tiny else {})))).save_pretrained(
            folder
        )
    torch.set_default_dtype(torch.float32)
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(folder)
    if not tiny:
        torch.cuda.empty_cache()


def in_use() -> float:
    """GiB in use on the fullest card, contexts of all processes included; 0 without GPUs."""
    if not torch.cuda.is_available():
        return 0.0
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return max(map(float, subprocess.run(asked, capture_output=True, text=True).stdout.split())) / 1024


def trained(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that tell a step's speed; none before there is a file."""
    lines = entries(run) if (run / "metrics.jsonl").exists() else []
    return [line for line in lines if line.get("tokens_per_s")]


def measure(case: Case, folder: Path, tiny: bool) -> dict[str, Any]:
    """Convert, train until the last stage has made its steps, and read what the run wrote."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    base(folder / "base", case.config, tiny)
    options = yaml.safe_load(recipe_path("gsa-window").read_text())["convert"]["options"]
    given = [word for option in options.items() for word in ("--set", "{}={}".format(*option))]
    convert = [sys.executable, *PROGRAM, "convert", str(folder / "base"), "--to", "gsa", *given, "--verify", "keys"]
    subprocess.run([*convert, "-o", str(folder / "converted")], check=True, stdout=sys.stderr)
    overrides = [f"model.base={folder / 'converted'}", "convert=null", f"output_dir={folder / 'run'}"]
    overrides += [
        "data.train={demo: train}",
        "data.eval={demo: heldout}",
        "eval.max_tokens=4096",
        "checkpoint.save_total_limit=1",
    ]
    overrides += case.overrides
    overrides += ["data.pack.seq_len=32", "runtime.device=cpu", "runtime.precision=fp32"] if tiny else []
    overrides += ["stages.logit_kl.loss.chunk_size=16"] if tiny and "long" in folder.name else []
    (folder / "peaks.py").write_text(PEAKS)
    launch = [*LAUNCH["fsdp"], "--num_processes", str(case.processes)]
    command = [sys.executable, *launch, str(folder / "peaks.py"), "finetune", "gsa-window", *overrides]
    ready, most = time.monotonic(), 0.0
    with open(folder / "log", "w") as log:
        running = subprocess.Popen([*command, "--max-steps", str(case.steps)], stdout=log, stderr=log)
        until = time.monotonic() + LIMIT
        while running.poll() is None and time.monotonic() < until:
            time.sleep(0.5)
            most = max(most, in_use())
            if sum(line["stage"] == STAGES[1] for line in trained(folder / "run")) >= case.steps:
                break
        if running.poll() is None:  # the launcher's processes have sessions of their own and would go on
            for process in [*psutil.Process(running.pid).children(recursive=True), running]:
                process.kill()
    log_lines = (folder / "log").read_text().splitlines()
    print("\n".join(log_lines[-25:]), file=sys.stderr)
    peaks = [line.split()[1:] for line in log_lines if line.startswith("PEAK")]
    return {
        "stages": rates(trained(folder / "run"), case.rows * case.length),
        "peaks": {name: round(int(count) / 2**30, 2) for name, count in peaks},
        "in_use": round(most, 2),
        "seconds": [round(ready - began), round(time.monotonic() - ready)],
    }


def main() -> None:
    folder, tiny = Path(sys.argv[1]), "--tiny" in sys.argv
    for name in [word for word in sys.argv[2:] if word != "--tiny"] or CASES:
        print(json.dumps({name: measure(CASES[name], folder / name, tiny)}), flush=True)


if __name__ == "__main__":
    main()
