"""Does a converted vision transformer still see? The digit in the marked cell of a canvas of real digits.

    python -m benchmarks.cued FOLDER --tokens 65 --mechanisms la saga mhla --seeds 0

A canvas has 4x4, 8x8 or 16x16 cells of 8x8 pixels, each with one of scikit-learn's 1,797 handwritten digits; the third
channel marks one cell, and the label is the digit in it. To answer, the class token must find the mark and read
that cell alone: what attention is for. Patches of 4 pixels make 64, 256 or 1024 tokens and the class token.

A small ViT is trained on canvases of 1,347 digits (larger canvases start from the smaller ones' weights), converted
to each mechanism and distilled with `linearize finetune`: attention transfer, then logit KL. The control is the same
linear model trained from scratch with the same steps on the same canvases. All are scored on the same 10,000 canvases
of the other 450 digits. One line of JSON per result, also in FOLDER/cued.jsonl.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from linearize.finetune import finetune
from linearize.recipe import load_recipe

CELL, PATCH = 8, 4
SIDES = {65: 4, 257: 8, 1025: 16}  # tokens -> cells along a side
HELD_OUT = 450
LEARNING_RATE = 2e-3

RECIPE = """
version: 1
name: {name}
seed: {seed}
output_dir: {folder}/run
model: {{base: {base}}}
convert:
  mechanism: {mechanism}
  options: {options}
data:
  train: {{arrays: {data}}}
stages: {stages}
checkpoint: {{every_steps: 100000}}
finish: {{verify: false}}
"""


class Digits:
    """Handwritten digits, 8x8 with values in [0, 1], in two disjoint parts."""

    def __init__(self) -> None:
        found = load_digits()
        order = np.random.default_rng(0).permutation(len(found.images))
        parts = np.split(order, [len(order) - HELD_OUT])
        self.parts = {
            name: (found.images[at] / 16.0, found.target[at]) for name, at in zip(("train", "eval"), parts, strict=True)
        }

    def canvases(self, part: str, side: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixel values [count,3,side*8,side*8] float16 in [-1, 1], and the digit in each marked cell."""
        images, targets = self.parts[part]
        random = np.random.default_rng([seed, side, part == "eval"])
        which = random.integers(len(images), size=(count, side, side))
        marked = random.integers(side * side, size=count)
        ink = images[which].transpose(0, 1, 3, 2, 4).reshape(count, side * CELL, side * CELL)
        mark = np.zeros((count, side * side), np.float32)
        mark[np.arange(count), marked] = 1.0
        mark = mark.reshape(count, side, side).repeat(CELL, 1).repeat(CELL, 2)
        pixels = np.stack([ink, ink, mark], 1) * 2.0 - 1.0
        labels = targets[which.reshape(count, -1)[np.arange(count), marked]]
        return pixels.astype(np.float16), labels


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


def train(model: Any, digits: Digits, side: int, steps: int, batch: int, device: str, seed: int) -> float:
    """Cross entropy on fresh canvases; returns seconds."""
    began = time.monotonic()
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        pixels, labels = digits.canvases("train", side, batch, 1_000_000 * (seed + 1) + step)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(pixel_values=torch.from_numpy(pixels).to(device).float()).logits
        loss = F.cross_entropy(logits.float(), torch.from_numpy(labels).to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return time.monotonic() - began


@torch.no_grad()
def answers(model: Any, canvases: tuple[np.ndarray, np.ndarray], device: str, batch: int = 250) -> np.ndarray:
    """Which canvases are answered rightly: bool [N]."""
    model.to(device).eval()
    found = []
    for start in range(0, len(canvases[0]), batch):
        pixels = torch.from_numpy(canvases[0][start : start + batch]).to(device).float()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found.append(model(pixel_values=pixels).logits.argmax(-1).cpu().numpy())
    return np.concatenate(found) == canvases[1]


def distil(
    place: Path, base: Path, data: Path, mechanism: str, options: dict[str, Any], stages: list[Any], seed: int
) -> Any:
    """The model that `linearize finetune` makes of `base`."""
    text = RECIPE.format(
        name=mechanism, seed=seed, folder=place, base=base, mechanism=mechanism, options=json.dumps(options), data=data,
        stages=json.dumps(stages),
    )  # fmt: skip
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "recipe.yaml").write_text(text)
    report = finetune(load_recipe(place / "recipe.yaml"), say=lambda line: None)
    return AutoModelForImageClassification.from_pretrained(report["output"], trust_remote_code=True)


def stages_of(args: argparse.Namespace, scratch: bool) -> list[dict[str, Any]]:
    """Transfer and KL, or the same number of steps of cross entropy."""
    common = {"batch": {"per_device": args.batch}, "schedule": {"name": "cosine", "warmup_ratio": 0.1}}
    if scratch:
        steps = args.transfer_steps + args.kl_steps
        return [{"kind": "sft", "train": "all", "optimizer": {"lr": LEARNING_RATE}, "steps": steps, **common}]
    return [
        {
            "kind": "attention_transfer",
            "train": "new",
            "optimizer": {"lr": args.transfer_lr},
            "steps": args.transfer_steps,
            **common,
        },
        {"kind": "logit_kl", "train": "all", "optimizer": {"lr": args.kl_lr}, "steps": args.kl_steps, **common},
    ]


def runs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per seed for the teacher, each mechanism and each mechanism from scratch."""
    device, digits, side = "cuda" if torch.cuda.is_available() else "cpu", Digits(), SIDES[args.tokens]
    asked = digits.canvases("eval", side, args.canvases, 7)
    for seed in args.seeds:
        place = args.folder / f"{args.tokens}-{seed}"
        model, spent = new_model(SIDES[65], seed), 0.0
        for size in [cells for cells in SIDES.values() if cells <= side]:
            model = model if size == SIDES[65] else grown(model, size, seed)
            steps = args.teacher_steps if size == SIDES[65] else args.grow_steps
            spent += train(model, digits, size, steps, args.batch, device, seed)
        right = answers(model, asked, device)
        row = {"tokens": args.tokens, "seed": seed, "device": device}
        yield row | {"model": "teacher", "accuracy": right.mean(), "seconds": spent}
        model.cpu().save_pretrained(place / "teacher")
        new_model(side, seed + 1000).save_pretrained(place / "untrained")
        count = args.batch * (args.transfer_steps + args.kl_steps)
        pixels, labels = digits.canvases("train", side, count, 11 + seed)
        np.savez(place / "train.npz", images=pixels, labels=labels)
        for mechanism in args.mechanisms:
            name, _, options = mechanism.partition(":")
            chosen = dict(pair.split("=") for pair in options.split(",")) if options else {}
            chosen = {key: json.loads(value) if value[0] in "0123456789tf[" else value for key, value in chosen.items()}
            for scratch in (False, True) if args.control else (False,):
                began = time.monotonic()
                base = place / ("untrained" if scratch else "teacher")
                work = place / f"{mechanism.replace(':', '-')}{'-scratch' if scratch else ''}"
                student = distil(work, base, place / "train.npz", name, chosen, stages_of(args, scratch), seed)
                own = answers(student, asked, device)
                lost, won = (right & ~own).mean(), (own & ~right).mean()
                yield row | {
                    "model": mechanism, "scratch": scratch, "accuracy": own.mean(), "behind": right.mean() - own.mean(),
                    "lost": lost, "won": won, "seconds": time.monotonic() - began,
                }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, choices=list(SIDES), default=65)
    parser.add_argument("--mechanisms", nargs="+", default=["la:features=hedgehog", "saga", "mhla"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--teacher-steps", type=int, default=600, help="on the smallest canvases")
    parser.add_argument("--grow-steps", type=int, default=300, help="on each larger size")
    parser.add_argument("--transfer-steps", type=int, default=80)
    parser.add_argument("--transfer-lr", type=float, default=1e-2)
    parser.add_argument("--kl-steps", type=int, default=120)
    parser.add_argument("--kl-lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--canvases", type=int, default=10_000, help="to score on")
    parser.add_argument("--control", action="store_true", help="also train each mechanism from scratch")
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    for row in runs(args):
        line = json.dumps(
            {key: round(float(x), 4) if isinstance(x, float | np.floating) else x for key, x in row.items()}
        )
        print(line, flush=True)
        with (args.folder / "cued.jsonl").open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
