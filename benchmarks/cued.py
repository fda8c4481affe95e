"""Does a converted vision transformer still see? The digit in the marked cell of a canvas of real digits.

    python -m benchmarks.cued FOLDER --mechanisms la:feature_map=hedgehog saga mhla --seed 0 --floor 90

A canvas has 4x4 cells of 8x8 pixels, each with one of scikit-learn's 1,797 handwritten digits; the third channel marks
one cell, and the label is the digit in it. To answer, the class token must find the mark and read that cell alone: what
attention is for. Patches of 4 pixels make 64 tokens and the class token.

A small ViT is trained on canvases of 1,347 digits, converted to each mechanism and distilled with `linearize finetune`:
attention transfer, then logit KL. All are scored on the same canvases of the other 450 digits. One line of JSON each.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification
from transformers.utils import logging as transformers_logging

from linearize.bench.timing import here
from linearize.finetune import finetune
from linearize.recipe.recipe import load_recipe

SIDE, CELL, PATCH = 4, 8, 4  # cells of a canvas, pixels of a cell and of a patch
HELD_OUT, BATCH, LEARNING_RATE = 450, 64, 2e-3
TEACHER_STEPS, TRANSFER_STEPS, KL_STEPS = 600, 80, 120
TRANSFER_LR, KL_LR = 1e-2, 1e-3
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

    def canvases(self, part: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixel values [count,3,32,32] float16 in [-1, 1], and the digit in each marked cell."""
        (images, targets), side = self.parts[part], SIDE
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


def new_model(seed: int) -> ViTForImageClassification:
    """A ViT of 4 layers, 142 thousand parameters."""
    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=SIDE * CELL,
        patch_size=PATCH, num_labels=10, initializer_range=0.1,
    )  # fmt: skip
    return ViTForImageClassification(config)


def train(model: Any, digits: Digits, seed: int, device: str) -> None:
    """Cross entropy on fresh canvases."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=TEACHER_STEPS, pct_start=0.1)
    for step in range(TEACHER_STEPS):
        pixels, labels = digits.canvases("train", BATCH, 1_000_000 * (seed + 1) + step)
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


def stages() -> list[dict[str, Any]]:
    """Transfer, then KL."""
    common = {"batch": {"per_device": BATCH}, "schedule": {"name": "cosine", "warmup_ratio": 0.1}}
    transfer = {"kind": "attention_transfer", "train": "new", "optimizer": {"lr": TRANSFER_LR}, "steps": TRANSFER_STEPS}
    distilled = {"kind": "logit_kl", "train": "all", "optimizer": {"lr": KL_LR}, "steps": KL_STEPS}
    return [transfer | common, distilled | common]


def distil(folder: Path, mechanism: str, *, seed: int, count: int) -> dict[str, Any]:
    """The row of the student that `linearize finetune` makes of FOLDER/teacher; `mechanism` is NAME or
    NAME:option=value,..."""
    began, (name, _, options) = time.monotonic(), mechanism.partition(":")
    transformers_logging.disable_progress_bar()
    place, chosen = folder / mechanism.replace(":", "-"), "{" + options.replace("=", ": ") + "}"
    text = RECIPE.format(
        name=name, seed=seed, folder=place, base=folder / "teacher", options=chosen, data=folder / "canvases.npz",
        stages=json.dumps(stages()),
    )  # fmt: skip
    place.mkdir()
    (place / "recipe.yaml").write_text(text)
    finetune(load_recipe(place / "recipe.yaml"), say=lambda line: None)
    model = AutoModelForImageClassification.from_pretrained(place / "run" / "final", trust_remote_code=True)
    right = answers(model, Digits().canvases("eval", count, 7), here())
    return {"mechanism": mechanism, "accuracy": float(right.mean()), "seconds": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mechanisms", nargs="+", default=["la:feature_map=hedgehog", "saga", "mhla"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--canvases", type=int, default=10_000, help="to score on")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--floor", type=float, default=0.0, help="percent; a student below it is an error")
    args = parser.parse_args()
    folder, digits = args.folder.resolve(), Digits()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pixels, labels = digits.canvases("train", CANVASES, 11 + args.seed)
    np.savez(folder / "canvases.npz", images=pixels, labels=labels)
    teacher = new_model(args.seed)
    train(teacher, digits, args.seed, here())
    teacher.save_pretrained(folder / "teacher")
    right = answers(teacher, digits.canvases("eval", args.canvases, 7), here())
    print(json.dumps({"mechanism": "softmax", "accuracy": float(right.mean())}), flush=True)
    blind = []
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        make = functools.partial(distil, folder, seed=args.seed, count=args.canvases)
        for row in pool.map(make, args.mechanisms):
            print(json.dumps(row), flush=True)
            blind += [row["mechanism"]] if 100 * row["accuracy"] < args.floor else []
    if blind:
        sys.exit(f"below {args.floor:g} % right: {', '.join(blind)}")


if __name__ == "__main__":
    main()
