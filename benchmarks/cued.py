"""Does a converted vision transformer still see? The digit in the marked cell of a canvas of real digits.

    python -m benchmarks.cued FOLDER --tokens 65 257 1025 --mechanisms la:feature_map=hedgehog saga mhla --seeds 0 1 2

A canvas has 4x4, 8x8 or 16x16 cells of 8x8 pixels, each with one of scikit-learn's 1,797 handwritten digits; the third
channel marks one cell, and the label is the digit in it. To answer, the class token must find the mark and read
that cell alone: what attention is for. Patches of 4 pixels make 64, 256 or 1024 tokens and the class token.

A small ViT is trained on canvases of 1,347 digits (larger canvases start from the smaller ones' weights), converted
to each mechanism and distilled with `linearize finetune`: attention transfer, then logit KL. The control is the same
linear model trained from scratch with the same steps on the same canvases. All are scored on the same canvases of the
other 450 digits. One line of JSON per result, also in FOLDER/cued.jsonl; what is there is not computed again.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification
from transformers.utils import logging as transformers_logging

from linearize.finetune import finetune
from linearize.recipe.recipe import load_recipe

CELL, PATCH = 8, 4
HELD_OUT, BATCH, LEARNING_RATE = 450, 64, 2e-3
TEACHER_STEPS = 600  # of each size


class Size(NamedTuple):
    side: int  # cells of a canvas
    transfer_steps: int
    kl_steps: int


SIZES = {65: Size(4, 80, 120), 257: Size(8, 120, 300), 1025: Size(16, 120, 300)}  # by number of tokens
TRANSFER_LR, KL_LR = 1e-2, 1e-3
FINISHED = "run/final"  # where `linearize finetune` leaves a student, below its folder
CANVASES = 12_800  # that students see, again and again where steps are many

RECIPE = """
version: 1
name: {name}
seed: {seed}
output_dir: {folder}/run
model: {{base: {base}}}
convert:
  mechanism: {name}
  options: {options}
data:
  train: {{arrays: {data}}}
stages: {stages}
checkpoint: {{every_steps: 100000}}
finish: {{verify: false}}
"""


class Digits:
    """Handwritten digits, 8x8 with values in [-1, 1], in two disjoint parts."""

    def __init__(self) -> None:
        found = load_digits()
        order = np.random.default_rng(0).permutation(len(found.images))
        parts = np.split(order, [len(order) - HELD_OUT])
        self.parts = {
            name: ((found.images[at] / 8.0 - 1.0).astype(np.float16), found.target[at])
            for name, at in zip(("train", "eval"), parts, strict=True)
        }

    def canvases(self, part: str, side: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixel values [count,3,side*8,side*8] float16 in [-1, 1], and the digit in each marked cell."""
        images, targets = self.parts[part]
        random = np.random.default_rng([seed, side, part == "eval"])
        which = random.integers(len(images), size=(count, side, side))
        marked = random.integers(side * side, size=count)
        pixels = np.empty((count, 3, side * CELL, side * CELL), np.float16)
        ink = images[which].transpose(0, 1, 3, 2, 4).reshape(count, side * CELL, side * CELL)
        pixels[:, 0] = pixels[:, 1] = ink
        mark = np.full((count, side * side), -1.0, np.float16)
        mark[np.arange(count), marked] = 1.0
        pixels[:, 2] = mark.reshape(count, side, side).repeat(CELL, 1).repeat(CELL, 2)
        labels = targets[which.reshape(count, -1)[np.arange(count), marked]]
        return pixels, labels


def new_model(side: int, seed: int) -> ViTForImageClassification:
    """A ViT of 4 layers, 142 thousand parameters at 65 tokens."""
    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=side * CELL,
        patch_size=PATCH, num_labels=10, initializer_range=0.1,
    )  # fmt: skip
    return ViTForImageClassification(config)


def grown(model: ViTForImageClassification, side: int, seed: int) -> ViTForImageClassification:
    """The same weights for larger canvases: position embeddings of the patches resampled."""
    larger = new_model(side, seed)
    weights = model.state_dict()
    name = next(name for name in weights if name.endswith("position_embeddings"))
    first, patches = weights[name][:, :1], weights[name][:, 1:]
    old, new = (int(m.shape[1] ** 0.5) for m in (patches, larger.state_dict()[name][:, 1:]))
    square = patches.unflatten(1, (old, old)).permute(0, 3, 1, 2)
    square = F.interpolate(square, size=(new, new), mode="bicubic")
    weights[name] = torch.cat([first, square.permute(0, 2, 3, 1).flatten(1, 2)], 1)
    larger.load_state_dict(weights)
    return larger


def train(model: Any, digits: Digits, side: int, steps: int, seed: int, device: str) -> None:
    """Cross entropy on fresh canvases."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        pixels, labels = digits.canvases("train", side, BATCH, 1_000_000 * (seed + 1) + step)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(pixel_values=torch.from_numpy(pixels).to(device).float()).logits
        loss = F.cross_entropy(logits.float(), torch.from_numpy(labels).to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def answers(model: Any, canvases: tuple[np.ndarray, np.ndarray], device: str, batch: int = 256) -> np.ndarray:
    """Which canvases are answered rightly: bool [N]."""
    model.to(device).eval()
    found = []
    for start in range(0, len(canvases[0]), batch):
        pixels = torch.from_numpy(canvases[0][start : start + batch]).to(device).float()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found.append(model(pixel_values=pixels).logits.argmax(-1).cpu().numpy())
    return np.concatenate(found) == canvases[1]


def stages_of(size: Size, scratch: bool) -> list[dict[str, Any]]:
    """Transfer and KL, or the same number of steps of cross entropy."""
    common = {"batch": {"per_device": BATCH}, "schedule": {"name": "cosine", "warmup_ratio": 0.1}}
    if scratch:
        steps = size.transfer_steps + size.kl_steps
        return [{"kind": "sft", "train": "all", "optimizer": {"lr": LEARNING_RATE}, "steps": steps, **common}]
    transfer = {"kind": "attention_transfer", "train": "new", "optimizer": {"lr": TRANSFER_LR}}
    kl = {"kind": "logit_kl", "train": "all", "optimizer": {"lr": KL_LR}}
    return [{**transfer, "steps": size.transfer_steps, **common}, {**kl, "steps": size.kl_steps, **common}]


def distil(place: Path, base: Path, data: Path, mechanism: str, stages: list[dict[str, Any]], seed: int) -> Any:
    """The model that `linearize finetune` makes of `base`; `mechanism` is NAME or NAME:option=value,..."""
    name, _, options = mechanism.partition(":")
    chosen = "{" + options.replace("=", ": ") + "}"
    text = RECIPE.format(
        name=name, seed=seed, folder=place, base=base, options=chosen, data=data, stages=json.dumps(stages)
    )
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "recipe.yaml").write_text(text)
    finetune(load_recipe(place / "recipe.yaml"), say=lambda line: None)
    return load(place / FINISHED)


def load(place: Path) -> Any:
    return AutoModelForImageClassification.from_pretrained(place, trust_remote_code=True)


# ---------------------------------------------------------------- what is run, and in which order


class Task(NamedTuple):
    """A `teacher`, the `canvases` that students train on, or a model of `mechanism`: `student` or `scratch`."""

    kind: str
    tokens: int
    seed: int
    mechanism: str = ""

    @property
    def place(self) -> str:
        return "-".join(str(part).replace(":", "-") for part in self if part != "")

    def needs(self) -> set[Task]:
        """What must be there before."""
        if self.kind == "teacher":
            smaller = [tokens for tokens in SIZES if tokens < self.tokens]
            return {self._replace(tokens=max(smaller))} if smaller else set()
        canvases = {Task("canvases", self.tokens, self.seed)}
        teacher = {Task("teacher", self.tokens, self.seed)}
        # Those from scratch do not need one to learn, but to be compared with.
        return set() if self.kind == "canvases" else canvases | teacher


def task_of(row: dict[str, Any]) -> Task:
    return Task(row["kind"], row["tokens"], row["seed"], row["mechanism"])


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """All of a run: students from the largest size down, then those from scratch from the smallest up, by seeds."""
    sizes = sorted(args.tokens)
    scratch = (Task("scratch", tokens, seed, m) for seed in args.seeds for tokens in sizes for m in args.mechanisms)
    return [
        *(Task("teacher", tokens, seed) for tokens in SIZES if tokens <= sizes[-1] for seed in args.seeds),
        *(Task("canvases", tokens, seed) for tokens in sizes[::-1] for seed in args.seeds),
        *(Task("student", tokens, seed, m) for tokens in sizes[::-1] for seed in args.seeds for m in args.mechanisms),
        *(scratch if args.control else ()),
    ]


@functools.lru_cache(maxsize=1)
def exam(side: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """What all models of a size are scored on; 10,000 of the largest take 11 seconds to make."""
    return Digits().canvases("eval", side, count, 7)


def work(folder: Path, trained: set[Task], task: Task, *, count: int) -> dict[str, Any]:
    """Does it, in a process of the pool: a row, with the answers to `count` canvases in FOLDER/PLACE.npy.

    A model of `trained` that is still there only answers.
    """
    began, device, digits = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu", Digits()
    size, place = SIZES[task.tokens], folder / task.place
    saved = place if task.kind == "teacher" else place / FINISHED
    transformers_logging.disable_progress_bar()
    row = {"kind": task.kind, "tokens": task.tokens, "seed": task.seed, "mechanism": task.mechanism, "device": device}
    if task.kind == "canvases":
        pixels, labels = digits.canvases("train", size.side, CANVASES, 11 + task.seed)
        np.savez(place.with_suffix(".npz"), images=pixels, labels=labels)
        return row
    if task in trained and saved.exists():
        model = load(saved)
    elif task.kind == "teacher":
        model = new_model(size.side, task.seed)
        for smaller in task.needs():
            model = grown(ViTForImageClassification.from_pretrained(folder / smaller.place), size.side, task.seed)
        train(model, digits, size.side, TEACHER_STEPS, task.seed, device)
        model.save_pretrained(place)
    else:
        base = folder / Task("teacher", task.tokens, task.seed).place
        if task.kind == "scratch":
            base = place.with_name(place.name + "-untrained")
            new_model(size.side, task.seed + 1000).save_pretrained(base)
        data = folder / f"{Task('canvases', task.tokens, task.seed).place}.npz"
        model = distil(place, base, data, task.mechanism, stages_of(size, task.kind == "scratch"), task.seed)
    right = answers(model, exam(size.side, count), device)
    np.save(place.with_suffix(".npy"), right)
    return row | {"accuracy": float(right.mean()), "seconds": time.monotonic() - began}


def answered(row: dict[str, Any], folder: Path, count: int) -> bool:
    """Whether a row of an earlier run holds for `count` canvases."""
    answers = folder / f"{task_of(row).place}.npy"
    return row["kind"] == "canvases" or (answers.exists() and len(np.load(answers)) == count)


def in_order(tasks: list[Task], done: set[Task], processes: int, start: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Rows of the tasks that are not `done`, as they come; each starts when all that it needs is there."""
    waiting, running = [task for task in tasks if task not in done], dict[Future[dict[str, Any]], Task]()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        while waiting or running:
            for task in [task for task in waiting if task.needs() <= done][: processes - len(running)]:
                waiting.remove(task)
                running[pool.submit(start, task)] = task
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done.add(running.pop(future))
                yield future.result()


# ---------------------------------------------------------------- what came out


def paired(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A model's row beside the teacher's answers to the same canvases: how far behind, what it lost, what it won."""
    if not row["mechanism"]:
        return row
    own, right = (np.load(folder / f"{task.place}.npy") for task in (task_of(row), Task("teacher", *task_of(row)[1:3])))
    lost, won = float((right & ~own).mean()), float((own & ~right).mean())
    return row | {"behind": lost - won, "lost": lost, "won": won}


def table(rows: list[dict[str, Any]]) -> str:
    """Mean and range over the seeds, in percent, in Markdown."""
    rows = [row for row in rows if "accuracy" in row]
    lines = ["| tokens | | seeds | right | behind the teacher |", "|---|---|---|---|---|"]
    kinds = sorted({(row["tokens"], row["kind"] == "scratch", row["mechanism"]) for row in rows})
    for tokens, scratch, mechanism in kinds:
        own = [r for r in rows if (r["tokens"], r["kind"] == "scratch", r["mechanism"]) == (tokens, scratch, mechanism)]
        name = (mechanism or "teacher") + (", from scratch" if scratch else "")
        behind = spread([row["behind"] for row in own]) if mechanism else ""
        lines.append(f"| {tokens} | {name} | {len(own)} | {spread([row['accuracy'] for row in own])} | {behind} |")
    return "\n".join(lines)


def spread(shares: list[float]) -> str:
    """97.61 (97.02 to 98.11)"""
    mean, least, most = (100 * share for share in (sum(shares) / len(shares), min(shares), max(shares)))
    return f"{mean:.2f} ({least:.2f} to {most:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", choices=list(SIZES), default=[65])
    parser.add_argument("--mechanisms", nargs="+", default=["la:feature_map=hedgehog", "saga", "mhla"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--canvases", type=int, default=10_000, help="to score on")
    parser.add_argument("--control", action="store_true", help="also train each mechanism from scratch")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--floor", type=float, default=0.0, help="percent; a student below it is an error")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "cued.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    trained = {task_of(row) for row in rows}
    rows = [row for row in {task_of(row): row for row in rows}.values() if answered(row, folder, args.canvases)]
    done = {task_of(row) for row in rows}
    with log.open("a") as file:
        start = functools.partial(work, folder, trained, count=args.canvases)
        for row in in_order(tasks_of(args), done, args.processes, start):
            rows.append(paired(row, folder))
            line = json.dumps({key: round(x, 4) if isinstance(x, float) else x for key, x in rows[-1].items()})
            print(line, flush=True)
            print(line, file=file, flush=True)
    print(table(rows))
    blind = [row for row in rows if row["kind"] == "student" and 100 * row["accuracy"] < args.floor]
    if blind:
        sys.exit(f"below {args.floor:g} % right: {', '.join(row['mechanism'] for row in blind)}")


if __name__ == "__main__":
    main()
