"""Which mechanism: converts one teacher to many students, distils each with the same tokens, measures all alike.

python -m benchmarks.study --teacher TEACHER --text TEXT --work WORK --out rows.jsonl gsa gsa-window "gsa lr=5e-4"

TEACHER is what benchmarks.study_teacher wrote, or `demo`; TEXT a folder of benchmarks.study_text with its tokenizer. A
variant is a name of VARIANTS, with changes of its fields or of the mechanism's options behind it; `last.KEY` and
`first.KEY` set a key of the recipe's last and first stage (`"gsa last.loss.temperature=2"`). Each adds a row of JSON to
--out; a variant that would not end before --seconds is left out. Processes that share --work share the list.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import functools
import hashlib
import json
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.convert import convert
from linearize.data.packing import build_blocks
from linearize.demo import model_folder
from linearize.job.source import plan_base
from linearize.job.start import versions
from linearize.measure.compare import EvalRequest, measure, parse_lengths, read_blocks
from linearize.measure.generate import load_tokenizer
from linearize.recipe.recipe import Recipe
from linearize.train.runs import Run
from linearize.train.runtime import make_accelerator, to_source
from linearize.train.save import load_whole
from linearize.train.session import Finetuner

SHOWN = ("variant", "ppl_ratio", "kl", "top1_agreement", "minutes", "overhead_s", "stages")


@dataclass(frozen=True)
class Variant:
    """A student and how it is trained: `transfer` is the share of the tokens that attention transfer gets."""

    mechanism: str
    options: dict[str, Any] = field(default_factory=dict)
    keep: str = ""
    transfer: float = 0.15
    transfer_lr: float = 1e-2
    transfer_train: str = "new"
    lr: float = 5e-4
    new_lr: float | None = None
    train: str = "all"
    lora: int = 0
    kl: float = 1.0
    ce: float = 0.0
    rows: int = 16
    warmup: float = 0.05
    floor: float = 0.02
    error: str = "relative"
    weight: float = 1.0
    frozen: str = ""  # parts of names of parameters that stay as they begin, several with + between
    tokens: float | None = None  # in place of the share
    keys: dict[str, Any] = field(default_factory=dict)  # of the recipe's stages: last.optimizer.betas, first.steps


HYBRID = "3,6"  # layers that keep softmax: benchmarks.layers on the teacher
# Slots that take turns hold the last tokens; the others need no short half-life.
SLOTS = {"slots": 128, "state_heads": "query", "half_life_min": 32, "clock": 112}
NEAR = {"window": 64, "sink": 1}
ONE_LOSS = {"kl": 0.0, "ce": 1.0, "transfer": 0.0}


def _variants() -> dict[str, Variant]:
    """Each mechanism alone, beside a window, with both a window and layers of softmax; and the baselines."""
    alone = {
        "gsa": Variant("gsa", SLOTS, new_lr=2e-3),
        "la": Variant("la", {"feature_map": "hedgehog"}, lr=1e-3),
        "retnet": Variant("retnet", lr=1e-3),
        "gla": Variant("gla", lr=1e-3),
        "gdn": Variant("gdn", lr=1e-3),
        "mhla": Variant("mhla", lr=1e-3),
        "sla-retnet": Variant("sla", {"base": "retnet"}, lr=1e-3),
        "sla-gla": Variant("sla", {"base": "gla"}, lr=1e-3),
        "sla-gdn": Variant("sla", {"base": "gdn"}, lr=1e-3),
    }
    found = {}
    for name, variant in alone.items():
        beside = {**variant.options, **NEAR}
        if name == "gsa":
            near = dataclasses.replace(variant, options={**beside, "clock": 0})
        else:  # the window alone begins so near that a high rate takes them away from their teacher
            near = dataclasses.replace(variant, options=beside, lr=3e-4, transfer=0.3)
        found |= {name: variant, f"{name}-window": near, f"{name}-hybrid": dataclasses.replace(near, keep=HYBRID)}
    for name in ("gsa", "gsa-window", "gsa-hybrid", "sla-gla"):
        found[f"{name}-ce"] = dataclasses.replace(found[name], **ONE_LOSS)  # type: ignore[arg-type]
    found["gsa-paper"] = Variant("gsa", {"faithful": True, "slots": 64}, **ONE_LOSS)  # type: ignore[arg-type]
    # 1000 / layers is the weight of LoLCATs' first stage (recipes/lolcats-style.yaml); both stages as long.
    lolcats = {"transfer": 0.5, "error": "mse", "weight": 125.0, "train": "lora", "lora": 8, "kl": 0.0, "ce": 1.0}
    features = {"feature_map": "hedgehog", "slope": 0.99, "window": 64}
    found["lolcats"] = Variant("la", features, lr=1e-4, warmup=0.0, floor=1.0, **lolcats)  # type: ignore[arg-type]
    return found


VARIANTS = _variants()


def _value(text: str) -> Any:
    """A number, true, false or null, a list as [0.9,0.99], or the text itself."""
    if text.startswith("["):
        return [_value(item) for item in text.strip("[]").split(",")]
    try:
        number = float(text)
        return int(number) if number.is_integer() and "." not in text.partition("e")[0] else number
    except ValueError:
        return {"true": True, "false": False, "null": None}.get(text, text)


def parse(text: str) -> tuple[str, Variant]:
    """`gsa lr=5e-4 slots=64` -> its name and the variant."""
    name, *changes = text.split()
    variant = VARIANTS[name]
    fields = {one.name for one in dataclasses.fields(Variant)}
    for change in changes:
        key, _, value = change.partition("=")
        parsed = _value(value)
        if key in fields:
            variant = dataclasses.replace(variant, **{key: value if key == "keep" else parsed})
        elif key.startswith(("first.", "last.")):
            variant = dataclasses.replace(variant, keys={**variant.keys, key: parsed})
        else:
            variant = dataclasses.replace(variant, options={**variant.options, key: parsed})
    return text, variant


def recipe_of(variant: Variant, name: str, arguments: argparse.Namespace, tokens: int) -> Recipe:
    """The recipe of a variant: `tokens` in all."""
    rows = {"per_device": arguments.rows or variant.rows}
    schedule = {"name": "cosine_with_min_lr", "warmup_ratio": variant.warmup, "min_lr_ratio": variant.floor}
    first = int(tokens * variant.transfer)
    transfer = {
        "kind": "attention_transfer",
        "train": variant.transfer_train.split("+"),
        "loss": {"error": variant.error, "weight": variant.weight},
        "optimizer": {"lr": variant.transfer_lr},
        "schedule": schedule,
        "tokens": first,
        "batch": rows,
    }
    lora = {"lora": {"r": variant.lora, "alpha": 2.0 * variant.lora}} if variant.lora else {}
    end_to_end = {
        "kind": "logit_kl",
        "train": variant.train.split("+"),
        "loss": {"kl": variant.kl, "ce": variant.ce},
        "optimizer": {"lr": variant.lr, "new_lr": variant.new_lr},
        "schedule": schedule,
        "tokens": tokens - first,
        "batch": rows,
        **lora,
    }
    stages = [transfer, end_to_end] if first else [end_to_end]
    for key, value in variant.keys.items():
        which, *between, name = key.split(".")
        place: dict[str, Any] = stages[0 if which == "first" else -1]
        for part in between:
            place[part] = dict(place.get(part, {}))  # both stages have one schedule and one batch
            place = place[part]
        place[name] = value
    demo = str(arguments.teacher) == "demo"
    data = {
        "train": {"files": [str((arguments.text / "distil.jsonl").resolve())]},
        "eval": {"demo": "heldout"} if demo else {"files": [str((arguments.text / "heldout.jsonl").resolve())]},
        "pack": {"seq_len": arguments.seq_len},
    }
    return Recipe.model_validate(
        {
            "version": 1,
            "name": name,
            "seed": arguments.seed,
            "output_dir": str(arguments.work / name),
            "model": {"base": str(arguments.teacher), "dtype": "float32"},
            "convert": {"mechanism": variant.mechanism, "options": variant.options, "keep_softmax": variant.keep},
            "data": data,
            "stages": stages,
            "checkpoint": {"every_steps": 10**6, "save_total_limit": 1},
            "eval": {"max_tokens": arguments.held_out},
        }
    )


def rms_norm(module: Any, x: Tensor) -> Tensor:
    """What an RMS norm of a Llama computes, in one kernel, in the dtype that autocast would give it for each of the
    linear layers behind it."""
    y = F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)
    return y.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else y


def lean(model: Any) -> Any:
    """The model with fewer passes over its activations."""
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = functools.partial(rms_norm, module)
    return model


def prepare(recipe: Recipe, arguments: argparse.Namespace) -> Run:
    """The run's folder with the converted base, and the packed text of the runs before."""
    shutil.rmtree(recipe.output_dir, ignore_errors=True)
    run = Run(recipe, "never", None)
    run.start(versions())
    (run.folder / "cache").symlink_to((arguments.work / "cache").resolve())
    plan, source, natives = plan_base(recipe)
    convert(plan, source, natives, run.converted, level="none", seed=recipe.seed, say=lambda text: None)
    return run


def base_path(teacher: Path) -> Path:
    """`demo` is the model that the package ships."""
    return model_folder() if str(teacher) == "demo" else teacher


def facts_of(folder: Path) -> dict[str, Any]:
    """The tokens that a teacher was trained on, and the hash of its weights."""
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if (folder / "teacher.json").exists():
        return {"tokens": json.loads((folder / "teacher.json").read_text())["tokens"], "sha256": weights}
    found = re.search(r"\*\*teacher tokens\*\* \| \*\*([\d,]+)\*\*", (folder / "README.md").read_text("utf-8"))
    assert found is not None
    return {"tokens": int(found[1].replace(",", "")), "sha256": weights}


def pack(arguments: argparse.Namespace) -> None:
    """Both texts in blocks, once for all processes that share --work."""
    cache = arguments.work / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    recipe = recipe_of(VARIANTS["gsa"], "pack", arguments, 10**6)
    tokenizer = load_tokenizer(base_path(arguments.teacher), False)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        read_blocks(recipe, tokenizer, cache)
        source = to_source(recipe.data.train, "text", recipe.folder)
        blocks = build_blocks(source, tokenizer, arguments.seq_len, cache, sft=False, max_tokens=None)
    print(
        f"{len(blocks) * arguments.seq_len:,} tokens to learn from, after {time.time() - arguments.start:.0f} s",
        flush=True,
    )


def claim(text: str, work: Path) -> bool:
    """Whether this process is the first to take a variant: several may be given the same list."""
    (work / "claims").mkdir(exist_ok=True)
    try:
        (work / "claims" / folder_name(text)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def folder_name(text: str) -> str:
    """A name for files of a variant."""
    return f"v{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def tokens_of(variant: Variant, facts: dict[str, Any], arguments: argparse.Namespace) -> int:
    """How many a variant learns from."""
    return arguments.limit or int(variant.tokens or arguments.share * facts["tokens"])


def row_of(text: str, variant: Variant, teacher: Any, facts: dict[str, Any], arguments: argparse.Namespace) -> Any:
    """Convert, distil and measure one variant."""
    tokens = tokens_of(variant, facts, arguments)
    recipe = recipe_of(variant, folder_name(text), arguments, tokens)
    began = time.monotonic()
    run = prepare(recipe, arguments)
    tuner = Finetuner(recipe, run, make_accelerator(recipe, run.folder), say=lambda line: print("  ", line, flush=True))
    tuner.load(run.converted)
    lean(tuner.model)
    for name, parameter in tuner.model.named_parameters():
        if any(part in name for part in variant.frozen.split("+") if part):
            parameter.requires_grad_().register_hook(torch.zeros_like)
    trained = time.monotonic()
    tuner.train()
    ended = time.monotonic()
    blocks = read_blocks(recipe, tuner.processor, run.folder / "cache")
    request = EvalRequest(parse_lengths(arguments.lengths), arguments.trials, arguments.seed, 32768)
    teacher.to(tuner.device)
    with torch.autocast(tuner.device.type, torch.bfloat16, enabled=tuner.wide):
        measures = measure(
            tuner.model, teacher.to(tuner.device), tuner.processor, blocks, recipe.eval.max_tokens, request
        )
    report = run.report([], True)
    shutil.rmtree(run.folder, ignore_errors=True)
    measures["heldout_tokens"] = measures.pop("tokens")
    return {
        "variant": text,
        **dataclasses.asdict(variant),
        "teacher_sha256": facts["sha256"][:16],
        "tokens": tokens,
        "seed": arguments.seed,
        "new_parameters": sum(p.numel() for n, p in tuner.student.named_parameters() if ".mixer." in n),
        "minutes": round((ended - trained) / 60, 2),
        "overhead_s": round(time.monotonic() - began - (ended - trained), 1),
        "hardware": torch.cuda.get_device_name() if tuner.device.type == "cuda" else "CPU",
        "stages": [[stage["name"], stage["tokens"], round(stage["ppl"], 4)] for stage in report["stages"]],
        **measures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", help="none: packs the text, for the processes that come after")
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.0495, help="of the teacher's tokens")
    parser.add_argument("--limit", type=int, help="tokens in place of --share and of a variant's own")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--lengths", default="256,512,1024,2048", help="of recall and needle texts")
    parser.add_argument("--trials", type=int, default=64, help="of them")
    parser.add_argument("--held-out", type=int, default=262_144, help="tokens that perplexity is measured on")
    parser.add_argument("--rows", type=int, help="blocks of a step, in place of the variant's")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--start", type=float, default=time.time(), help="when the clock began, in Unix seconds")
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    pack(arguments)
    folder = base_path(arguments.teacher)
    facts = facts_of(folder)
    teacher = lean(load_whole(folder, torch.float32, False).eval())
    pace, overhead = 0.0, 0.0  # the slowest so far: seconds a token, and seconds beside training
    for text, variant in map(parse, arguments.variants):
        began = time.time()
        expected = overhead + pace * tokens_of(variant, facts, arguments)
        if began + expected > arguments.start + arguments.seconds:
            print(f"no time for {text}", flush=True)
            continue
        if not claim(text, arguments.work):
            continue
        print(f"{text}: begins after {began - arguments.start:.0f} s", flush=True)
        row = row_of(text, variant, teacher, facts, arguments)
        pace, overhead = max(pace, 60.0 * row["minutes"] / row["tokens"]), max(overhead, row["overhead_s"])
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({key: row[key] for key in SHOWN}), flush=True)


if __name__ == "__main__":
    main()
