"""What the tests of pages share: a parser that is strict about tags, and the folder of a run that never ran."""

from __future__ import annotations

import itertools
import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from training import base, make_recipe, stage


class Page(HTMLParser):
    """Checks that tags close in order; collects sections, texts of drawings, and what would be loaded."""

    VOID = {"meta", "br", "img", "link", "input", "hr"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: list[str] = []
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attrs)
        if tag == "section":
            self.sections.append(given["id"] or "")
        self.loads += [
            f"{tag} {key}={value}" for key, value in attrs if key in ("src", "href") and not str(value).startswith("#")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def eval_result(depths: bool = True) -> dict[str, Any]:
    """What `linearize eval --json` prints."""
    needle = []
    for length in (256, 1024, 4096):
        row: dict[str, Any] = {"length": length, "entries": 1}
        for who, share in (("student", 0.25), ("teacher", 1.0)):
            row[who] = {"accuracy": share, "loss": 1.0} | ({"depths": [share, 0.5, None, 0.0, 1.0]} if depths else {})
        needle.append(row)
    edges = (0, 512, 1024, 2048)
    blocks = [
        {"from": a, "to": b, "tokens": 9, "student_ppl": 9.0 + b / 900, "teacher_ppl": 9.0, "ppl_ratio": 1.1, "kl": 0.1}
        for a, b in itertools.pairwise(edges)
    ]
    positions = {"trained_length": 512, "rows": 4, "text": "joined", "blocks": blocks, "grows": 1.2}
    figures = {
        "text": "/some/where/held.txt",
        "tokens": 999,
        "dtypes": {"student": "float32", "teacher": "float32"},
        "student_ppl": 10.5,
        "teacher_ppl": 10.0,
        "ppl_ratio": 1.05,
        "kl": 0.07,
        "top1_agreement": 0.9,
    }
    return {**figures, "needle": needle, "recall": [], "state": [], "positions": positions}


def made_up_run(folder: Path, root: Path, steps: int = 40, name: str = "tiny", end: float = 12.0) -> Path:
    """The folder of a run that never ran: made-up metrics of a real recipe and a real converted base.

    Its teacher has perplexity 10, and it ends at `end`.
    """
    stages = (stage("attention_transfer"), stage("logit_kl"))
    recipe = make_recipe(folder, base(root, "llama"), *stages, name=name)
    place = folder / "run"
    place.mkdir()
    settings = {"recipe": recipe.resolved(), "max_steps": None, "processes": 1, "finished": True}
    (place / "run.json").write_text(json.dumps({**settings, "versions": {"torch": "2.13.0", "linearize": "0.2.0"}}))
    evaluated = {"tokens": 0, "step": 0, "eval_tokens": 512, "eval_accuracy": 0.5, "eval_dtype": "bfloat16"}
    layers = [{"layer": layer, "relative_mse": 0.5, "cosine": 0.8} for layer in (0, 1)]
    lines: list[dict[str, Any]] = [{"stage": "teacher", "eval_ppl": 10.0, **evaluated}]
    lines += [{"stage": "converted", "eval_ppl": 30.0, **evaluated}]
    lines += [{"stage": "converted", "step": 0, "tokens": 0, "layers": layers}]
    noise = random.Random(0)
    for name in ("attention_transfer", "logit_kl"):
        for step in range(1, steps + 1):
            entry = {"stage": name, "step": step, "tokens": 64 * step, "tokens_per_s": 500, "memory": 2**30}
            lines.append({**entry, "loss": (0.2 + noise.random()) / math.sqrt(step), "lr": 1e-3, "grad_norm": 1.0})
        lines.append({"stage": name, **evaluated, "step": steps, "tokens": 64 * steps, "eval_ppl": end, "eval_kl": 0.1})
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = {"prompt": "def f(<b>", "teacher": "x):\n    return x", "student": "y): \x1b[31m", "text": "x, y):"}
    report = {
        "layers": [{**one, "relative_mse": 0.05} for one in layers],
        "samples": [sample],
        "device": "CPU, 1 thread",
    }
    (place / "report.json").write_text(
        json.dumps({"output": str(place / "final"), "stages": [], "teacher_ppl": 10.0, **report})
    )
    (place / "eval.json").write_text(json.dumps(eval_result()))
    return place
