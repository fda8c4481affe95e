"""What every pair of layers is worth as softmax, and which pair each method of `--keep-softmax auto:2` chooses.

The mixers learn by attention transfer first; that does not depend on which layers are kept, so one run serves all
pairs. Then each pair is compared with the source on text that is held out, and on texts that ask for a repetition.

With --heads, sets of heads as --keep-heads names them are compared in place of pairs, and no method chooses. With
--needles N they look for N needles as well, and are compared with the source on their answers.

python -m benchmarks.pairs --set slots=64 --set state_heads=query
python -m benchmarks.pairs --set window=64 --set sink=1 --heads "4:1" "4:1;5:0"
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from linearize.choose.choose import (
    BATCH_TOKENS,
    RECALL_TOKENS,
    TRANSFER_LR,
    Scorer,
    Scoring,
    by_method,
    cut,
    load_source,
    recall_batch,
    recall_batches,
    text_batches,
)
from linearize.choose.mixture import Mixture
from linearize.convert import plan_conversion
from linearize.data.batches import targets
from linearize.data.packing import TextSource, build_blocks
from linearize.demo import model_folder
from linearize.measure.generate import load_tokenizer
from linearize.measure.recall import Row, Writer, rows_of, score
from linearize.plan.heads import parse_groups, written
from linearize.plan.keep import METHODS
from linearize.plan.mechanisms import parse_settings
from linearize.train.losses import cross_entropy


def source_of(name: str) -> TextSource:
    """A file of text, or one of the demo's three."""
    return TextSource(files=(Path(name),)) if "." in name else TextSource(demo=name)  # type: ignore[arg-type]


@torch.no_grad()
def loss(mixture: Mixture, scorer: Scorer, kept: Any) -> float:
    """Mean cross entropy of the next token with these layers, or heads, kept."""
    gates = mixture.hybrid(kept)
    values: list[Tensor] = [cross_entropy(mixture.logits(b, gates), targets(b)) for b in scorer.batches["text"]]
    return float(torch.stack(values).mean())


class Reader:
    """The hybrid that keeps softmax in some layers, or heads, as `score` calls a model."""

    def __init__(self, mixture: Mixture, kept: Any) -> None:
        self.mixture, self.gates, self.device = mixture, mixture.hybrid(kept), mixture.model.device

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        places = torch.arange(input_ids.shape[1], device=self.device).expand_as(input_ids)
        batch = {"input_ids": input_ids, "position_ids": places}
        return SimpleNamespace(logits=self.mixture.logits(batch, self.gates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(model_folder()))
    parser.add_argument("--mechanism", default="gsa")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--train", default="packages", help="text of the transfer: a file, train or packages")
    parser.add_argument("--held-out", default="heldout", help="text of the comparison: a file or heldout")
    parser.add_argument("--transfer-tokens", type=int, default=61440)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--heads", nargs="*", default=[], help="sets of heads to compare in place of pairs of layers")
    parser.add_argument("--needles", type=int, default=0, help="texts of --length tokens that hide a needle")
    arguments = parser.parse_args()
    options = parse_settings(arguments.settings)
    plan, source, natives = plan_conversion(arguments.model, arguments.mechanism, options=options)
    tokenizer = load_tokenizer(source.folder, False)
    scoring = Scoring(text=source_of(arguments.train), seq_len=arguments.length)

    def mixture() -> Mixture:
        torch.manual_seed(scoring.seed)
        return Mixture(load_source(source, natives, plan, scoring), plan)

    device = (whole := mixture()).model.device
    train, text = text_batches(scoring.text, tokenizer, arguments.length, device)
    recall, _ = recall_batches(tokenizer, min(arguments.length, RECALL_TOKENS), scoring.seed, device)
    for method in () if arguments.heads else arguments.methods:
        began, fresh = time.process_time(), mixture()
        fresh.calibrate(train[0])
        fresh.train_mixers(train, TRANSFER_LR)
        scorer = Scorer(fresh, text, recall)
        chosen = by_method(method, scorer, 2)
        scores = {layer: round(score, 3) for layer, score in chosen.scores.items()}
        seconds = round(time.process_time() - began, 1)
        print(json.dumps({"method": method, "kept": chosen.kept, "cpu_s": seconds, "scores": scores}), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        count = arguments.transfer_tokens
        blocks = build_blocks(scoring.text, tokenizer, arguments.length, Path(scratch), sft=False, max_tokens=count)
        size = max(1, BATCH_TOKENS // arguments.length)
        batches = cut(blocks, range(len(blocks)), size, device)
        held = build_blocks(source_of(arguments.held_out), tokenizer, arguments.length, Path(scratch), sft=False,
                            max_tokens=arguments.tokens)  # fmt: skip
        compared = [batch | {"asked": batch["valid"]} for batch in cut(held, range(len(held)), size, device)]
    whole.calibrate(batches[0])
    whole.train_mixers(batches, TRANSFER_LR)
    lists, _ = recall_batches(tokenizer, min(arguments.length, RECALL_TOKENS), 1, device)
    scorer = Scorer(whole, compared, lists)
    teacher = loss(whole, scorer, tuple(whole.layers))
    needles = list[Row]()
    if arguments.needles:
        around = [token for number in range(len(held)) for token in held[number]["input_ids"].tolist()]
        writer = Writer(tokenizer, scoring.seed)
        needles = rows_of("needle", writer, arguments.length, arguments.needles, around)
        found = score(Reader(whole, tuple(whole.layers)), needles, size)["accuracy"]
        print(json.dumps({"kept": whole.layers, "needles": found}), flush=True)
        places = range(0, len(needles), size)
        scorer.batches["needle"] = [recall_batch(needles[start : start + size], device) for start in places]
    sets: list[Any] = [(), *itertools.combinations(whole.layers, 2)]
    if arguments.heads:
        sets = [(), *map(parse_groups, arguments.heads)]
    for kept, values in zip(sets, scorer.kl(sets), strict=True):
        ratio = math.exp(loss(whole, scorer, kept) - teacher)
        named = written(kept) if arguments.heads else kept
        row = {"kept": named, "ppl_ratio": round(ratio, 4), **{f"kl_{k}": round(v, 4) for k, v in values.items()}}
        if needles:
            row["needles"] = score(Reader(whole, kept), needles, size)["accuracy"]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
