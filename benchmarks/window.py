"""Perplexity of the demo model right after conversion, by how much of the mechanism comes through beside the window;
then with norms and windows calibrated on 4,096 tokens of other text, which is where training starts.

python -m benchmarks.window --mechanism gsa --set window=64 --set clock=0
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.convert import plan_conversion
from linearize.demo import model_folder
from linearize.demo.corpus import Document, documents, package_documents
from linearize.plan.mechanisms import load_mechanism, parse_settings
from linearize.train.losses import next_token_ce
from linearize.train.stages import Calibration
from linearize_kernels.hf.attention_hooks import Linearized, attach, mixers_of

LENGTH = 512
LOGITS = (-20.0, -6.0, -4.0, -2.0, -1.0, 0.0, 1.0)


def read(texts: Iterable[Document], tokens: int) -> Tensor:
    """The first `tokens` tokens of the first 40 documents, [.., LENGTH]."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder(), model_max_length=10**9)
    texts = itertools.islice(texts, 40)
    ids = list(itertools.chain.from_iterable(tokenizer(document.text)["input_ids"] for document in texts))
    return torch.tensor(ids[:tokens]).view(-1, LENGTH)


@torch.no_grad()
def perplexity(model: torch.nn.Module, ids: Tensor) -> float:
    losses = [next_token_ce(model(rows, use_cache=False).logits, rows) * len(rows) for rows in ids.split(8)]
    return math.exp(float(sum(losses)) / len(ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanism", default="gsa")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--theta", type=float, nargs="*", default=LOGITS)
    arguments = parser.parse_args()
    ids = read(documents("heldout"), arguments.tokens)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32).eval()
    print(f"teacher            {perplexity(model, ids):.3f}")
    plan, _, _ = plan_conversion(str(model_folder()), arguments.mechanism, options=parse_settings(arguments.settings))
    attach(model, plan.spec(), {arguments.mechanism: load_mechanism(arguments.mechanism)})
    windows = [mixer.near for mixer in mixers_of(model).values()]
    for logit in arguments.theta if windows[0] is not None else (0.0,):
        for window in filter(None, windows):
            torch.nn.init.constant_(window.far_logit, logit)
        print(f"converted, {logit:5.1f}   {perplexity(model, ids):.3f}", flush=True)
    nobody: Any = None
    with Linearized.transferring(model, Calibration(nobody)):
        model(read(package_documents(), 4096), use_cache=False)
    print(f"calibrated         {perplexity(model, ids):.3f}", flush=True)


if __name__ == "__main__":
    main()
