"""One process against two, for docs/measurements/processes.md: losses, resume on another number of processes, speed.

    python -m benchmarks.processes FOLDER                    # two GPUs, about 5 minutes; JSON on stdout
    python -m benchmarks.processes FOLDER throughput zero    # parts alone: throughput, zero, compiled, equality

Equality is measured on the model that linearize ships, in float32; throughput on a Llama of random weights in bf16;
`zero` adds ZeRO-3 to both, which needs deepspeed; `compiled` is throughput with `runtime.compile`. Without GPUs the
same happens with gloo and tiny sizes, which proves this file and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from linearize.demo import model_folder

GPU = torch.cuda.is_available()
ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2", "--main_process_port", "0"]
LAUNCH = {"one": [], "ddp": [*ACCELERATE, "--multi_gpu"], "fsdp": [*ACCELERATE, "--use_fsdp", "--fsdp_version", "2"]}
ZERO = {"zero": [*ACCELERATE, "--use_deepspeed", "--zero_stage", "3"]}
# Kills itself, politely, after so many optimizer steps of its life.
STOP = """
import os, signal, sys
from linearize import cli
from linearize.train import loop
update, left = loop.StageLoop._update, int(sys.argv.pop(1))
def counted(*arguments):
    global left
    update(*arguments)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGTERM)
loop.StageLoop._update = counted
cli.main()
"""
STEPS, BLOCKS = (10, 8) if GPU else (3, 4)
TIMED = (15, 16, 2048) if GPU else (4, 4, 32)  # steps, blocks a step, tokens a block
LARGE = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 12}
LARGE |= {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000}
SMALL = {**LARGE, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "head_dim": 16}


def recipe(folder: Path, name: str, steps: int, blocks: int, how: str, **changes: Any) -> Path:
    """A recipe file for a run in folder/name, of two stages; `blocks` a step, over all processes."""
    batch = {"per_device": blocks // 2, "gradient_accumulation_steps": 2 if how == "one" else 1}
    shared = {"steps": steps, "batch": batch, "optimizer": {"lr": 1e-3}}
    values = {
        "version": 1,
        "name": name,
        "output_dir": str(folder / name),
        "model": {"base": "demo", "dtype": "float32"},
        "convert": {"mechanism": "gsa"},
        "data": {"train": {"demo": "train"}, "eval": {"demo": "heldout"}, "pack": {"seq_len": 512 if GPU else 32}},
        "stages": [
            {"kind": "attention_transfer", "train": ["new"], **shared},
            {"kind": "logit_kl", "train": ["all"], **shared},
        ],
        "runtime": {"precision": "fp32"},
        "eval": {"max_tokens": 32768 if GPU else 64},
        "finish": {"verify": False},
    }
    path = folder / f"{name}-{how}.yaml"
    path.write_text(json.dumps(values | changes))
    return path


def run(path: Path, how: str, gpu: int = 0, stop: int | None = None) -> dict[str, Any]:
    """`linearize finetune`: exit code, seconds, the end of stderr."""
    program = ["-m", "linearize"]
    if stop is not None:
        program = [str(path.parent / "stop.py"), str(stop)]
    environment = dict(os.environ)
    if how == "one":
        shown = environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        environment["CUDA_VISIBLE_DEVICES"] = shown[gpu]
    began = time.monotonic()
    command = ["timeout", "-k", "5", "170", sys.executable, *(LAUNCH | ZERO)[how], *program, "finetune", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = done.stderr[-2500:] if done.returncode else done.stderr[-300:]
    print(f"{path.stem} {done.returncode} {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return {"code": done.returncode, "seconds": round(time.monotonic() - began, 1), "stderr": said}


def entries(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def equality(folder: Path, zero: bool = False) -> dict[str, Any]:
    """Runs of the shipped model that should be the same, all at once; each one's distance from the first."""
    cases: dict[str, tuple[list[tuple[str, int | None]], dict[str, Any]]] = {
        "one": ([("one", None)], {"finish": {"verify": True}}),
        "again": ([("one", None)], {}),
        "cpu": ([("one", None)], {"runtime": {"precision": "fp32", "device": "cpu"}}),
        "ddp": ([("ddp", None)], {}),
        "fsdp": ([("fsdp", None)], {}),
        "resumed": ([("one", STEPS + 2), ("one", None)], {}),
        "one, then fsdp": ([("one", STEPS + 2), ("fsdp", None)], {}),
        "fsdp, then one": ([("fsdp", STEPS + 1), ("one", None)], {}),
        "ddp, then fsdp": ([("ddp", 2), ("fsdp", None)], {}),
        **{
            f"compile {how}": ([(how, None)], {"runtime": {"precision": "fp32", "compile": True}})
            for how in ("one", "ddp", "fsdp")
        },
        "bf16": ([("one", None)], {"runtime": {"precision": "bf16"}}),
        "bf16 ddp": ([("ddp", None)], {"runtime": {"precision": "bf16"}}),
        "bf16 fsdp": ([("fsdp", None)], {"runtime": {"precision": "bf16"}}),
        "fp16": ([("one", None)], {"runtime": {"precision": "fp16"}}),
        "fp16 ddp": ([("ddp", None)], {"runtime": {"precision": "fp16"}}),
    }
    if zero:
        cases |= {"zero": ([("zero", None)], {}), "bf16 zero": ([("zero", None)], {"runtime": {"precision": "bf16"}})}
    if not GPU:
        cases = {name: case for name, case in cases.items() if name.partition(" ")[0] not in ("cpu", "compile", "fp16")}

    def each(number: int, name: str) -> dict[str, Any]:
        parts, changes = cases[name]
        place = name.replace(" ", "-").replace(",", "")
        made = []
        for how, stop in parts:
            made.append(run(recipe(folder, place, STEPS, BLOCKS, how, **changes), how, number % 2, stop))
        return {"runs": made, "folder": folder / place}

    with ThreadPoolExecutor(len(cases) if GPU else 1) as pool:
        jobs = {name: pool.submit(each, number, name) for number, name in enumerate(cases)}
        found = {name: job.result() for name, job in jobs.items()}
    return {name: compare(case, found["one"]) for name, case in found.items()}


def compare(case: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The largest relative difference of losses, gradient norms and perplexities."""
    result: dict[str, Any] = {"runs": case["runs"]}
    try:
        ours, theirs = entries(case["folder"]), entries(first["folder"])
        result["lines"] = [len(ours), len(theirs)]
        for key in ("loss", "grad_norm", "eval_ppl"):
            pairs = [(a[key], b[key]) for a, b in zip(ours, theirs, strict=True) if a.get(key) is not None]
            result[key] = max(abs(a - b) / b for a, b in pairs)
        result["last"] = {key: ours[-2].get(key) for key in ("loss", "grad_norm")} | {"ppl": ours[-1]["eval_ppl"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        result["error"] = repr(error)
    return result


def throughput(folder: Path, hows: Iterable[str] = LAUNCH, compiled: bool = False) -> dict[str, Any]:
    """Tokens a second of each stage, the same global batch on one GPU and on two, and with `runtime.compile`; alone on
    the machine."""
    steps, blocks, length = TIMED
    source = folder / "large"
    with torch.device("cuda" if GPU else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**(LARGE if GPU else SMALL), pad_token_id=None)).to(torch.bfloat16)
    model.save_pretrained(source)
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(source)
    size = sum(p.numel() for p in model.parameters())
    del model
    if GPU:
        torch.cuda.empty_cache()
    result: dict[str, Any] = {"parameters": size, "blocks": blocks, "length": length}
    base, convert = {"base": str(source)}, {"mechanism": "gsa"}
    for how in hows:
        changes = {
            "runtime": {"precision": "bf16", "compile": compiled},
            "data": {"train": {"demo": "train"}, "pack": {"seq_len": length}},
        }
        path = recipe(folder, f"large-{how}", steps, blocks, how, model=base, convert=convert, **changes)
        result[how] = run(path, how)
        base, convert = {"base": str(folder / f"large-{next(iter(hows))}" / "converted")}, None
        try:
            result[how] |= rates(entries(folder / f"large-{how}"), blocks * length)
        except (OSError, KeyError, ZeroDivisionError) as error:
            result[how]["error"] = repr(error)
    return result


def rates(lines: Iterable[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """By stage: tokens a second over the last two thirds of the steps, the losses, the largest memory in GiB."""
    stages: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line.get("tokens_per_s"):
            stages.setdefault(line["stage"], []).append(line)
    found = {}
    for name, rows in stages.items():
        # The rate is that since the start; so many steps took so many seconds.
        seconds = [row["step"] * tokens / row["tokens_per_s"] for row in rows]
        begin = len(rows) // 3
        found[name] = {
            "tokens_per_s": round((len(rows) - 1 - begin) * tokens / (seconds[-1] - seconds[begin])),
            "loss": [row["loss"] for row in rows],
            "memory": round(max(row["memory"] for row in rows) / 2**30, 2),
        }
    return found


def main() -> None:
    folder, parts = Path(sys.argv[1]), sys.argv[2:] or ["throughput", "equality"]
    folder.mkdir(parents=True)
    (folder / "stop.py").write_text(STOP)
    result: dict[str, Any] = {"torch": torch.__version__, "gpus": torch.cuda.device_count()}
    if "throughput" in parts:
        result["throughput"] = throughput(folder, [*LAUNCH, *ZERO] if "zero" in parts else LAUNCH)
        print(json.dumps(result), flush=True)
    if "compiled" in parts:
        (folder / "compiled").mkdir()
        result["compiled"] = throughput(folder / "compiled", ("one", "fsdp"), compiled=True)
        print(json.dumps(result), flush=True)
    if "equality" in parts:
        result["equality"] = equality(folder, zero="zero" in parts)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
