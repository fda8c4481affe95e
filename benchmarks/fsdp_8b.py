"""All weights of an 8B model on two cards with FSDP2, for docs/cost.md: speed and memory of the preset gsa-window.

    python -m benchmarks.fsdp_8b FOLDER          # two GPUs of 80 GB, about 6 minutes; 40 GiB in FOLDER; JSON on stdout
    python -m benchmarks.fsdp_8b FOLDER --tiny   # the same on a CPU with a small model, which proves this file alone

Random weights of Llama 3.1 8B's shape. The run is killed when the second stage has made its steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from linearize.demo import model_folder
from linearize.recipe.presets import recipe_path

from .estimate import RECIPES, SMALL
from .processes import LAUNCH, entries

STEPS, LIMIT = 8, 420  # of a stage; seconds
PROGRAM = ["-m", "linearize"]


def base(folder: Path, tiny: bool) -> None:
    """Random weights in bf16 of Llama 3.1 8B's shape, with the tokenizer of the demo model."""
    sizes = {key: value for key, value in RECIPES["Llama 3.1 8B"][0].items() if key not in ("model_type", "dtype")}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cpu" if tiny else "cuda"):
        LlamaForCausalLM(LlamaConfig(**(sizes | (SMALL | {"vocab_size": 2048} if tiny else {})))).save_pretrained(
            folder
        )
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(folder)
    if not tiny:
        torch.cuda.empty_cache()


def trained(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that tell a step's speed; none before there is a file."""
    lines = entries(run) if (run / "metrics.jsonl").exists() else []
    return [line for line in lines if line.get("tokens_per_s")]


def main() -> None:
    folder, tiny = Path(sys.argv[1]), "--tiny" in sys.argv
    folder.mkdir(parents=True)
    base(folder / "base", tiny)
    options = yaml.safe_load(recipe_path("gsa-window").read_text())["convert"]["options"]
    given = [word for option in options.items() for word in ("--set", "{}={}".format(*option))]
    convert = [sys.executable, *PROGRAM, "convert", str(folder / "base"), "--to", "gsa", *given, "--verify", "keys"]
    subprocess.run([*convert, "-o", str(folder / "converted")], check=True, stdout=sys.stderr)
    overrides = [f"model.base={folder / 'converted'}", "convert=null", f"output_dir={folder / 'run'}"]
    overrides += ["data.train={demo: train}", "data.eval={demo: heldout}", "eval.max_tokens=4096", "checkpoint.keep=1"]
    overrides += ["data.pack.seq_len=32", "runtime.device=cpu", "runtime.precision=fp32"] if tiny else []
    command = [sys.executable, *LAUNCH["fsdp"], *PROGRAM, "finetune", "gsa-window", *overrides]
    with open(folder / "log", "w") as log:
        running = subprocess.Popen([*command, "--max-steps", str(STEPS)], stdout=log, stderr=log)
        until = time.monotonic() + LIMIT
        while running.poll() is None and time.monotonic() < until:
            time.sleep(0.5)
            if sum(line["stage"] == "logit_kl" for line in trained(folder / "run")) >= STEPS:
                break
        if running.poll() is None:  # the launcher's processes have sessions of their own and would go on
            for process in [*psutil.Process(running.pid).children(recursive=True), running]:
                process.kill()
    print((folder / "log").read_text()[-4000:], file=sys.stderr)
    print(json.dumps(trained(folder / "run")))


if __name__ == "__main__":
    main()
