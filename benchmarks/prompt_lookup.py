"""Prompt lookup against plain decoding, in CPU seconds on one thread: code that goes on as it began.

linearize demo -o demo-run
python -m benchmarks.prompt_lookup demo-run/linear/final demo-run/hybrid/final

For each text: tokens of the prompt, whether both ways write the same tokens, the CPU seconds of each (median of three,
in turns), their ratio, and how often lookup called the model. It ends with 1 if tokens differ, or if a ratio is below
--least.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def texts() -> dict[str, str]:
    """Beginnings of code that repeats itself."""
    names = ("name", "path", "size", "mode", "owner")
    accessors = (
        f"    def get_{name}(self):\n        return self._{name}\n\n"
        f"    def set_{name}(self, value):\n        self._{name} = value\n\n"
        for name in names
    )
    numbers = ("one", "two", "three", "four", "five")
    tests = (
        f"    def test_{name}(self):\n        self.assertEqual(parse('{name}'), {i})\n"
        f"        self.assertRaises(ValueError, parse, '{name} ')\n\n"
        for i, name in enumerate(numbers)
    )
    head = "def read(path):\n    with open(path) as file:\n"
    body = (
        "        lines = file.readlines()\n    result = []\n    for line in lines:\n        line = line.strip()\n"
        "        if not line:\n            continue\n        result.append(line)\n    return result\n\n"
    )
    return {
        "accessors": "class Config:\n" + "".join(accessors) + "    def get_group(self):\n",
        "tests": "".join(tests) + "    def test_six(self):\n",
        "table": "names = {\n" + "".join(f"    'key_{i}': 'value_{i}',\n" for i in range(12)),
        "a function again": head + body + head,
    }


def written(model: Any, inputs: Any, new: int, **how: Any) -> tuple[list[int], float]:
    """The tokens that follow, and the CPU seconds that they took."""
    before = time.process_time()
    out = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, **how)
    return out[0, inputs.input_ids.shape[1] :].tolist(), time.process_time() - before


def compare(folder: str, new: int, lookup: int) -> list[float]:
    """Print a line for each text; the ratios, 0 where tokens differ."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    calls: list[int] = []
    model.register_forward_hook(lambda *args: calls.append(1))
    ratios = []
    for name, text in texts().items():
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        ways: tuple[dict[str, Any], ...] = ({}, {"prompt_lookup_num_tokens": lookup})
        for way in ways:
            written(model, inputs, 8, **way)
        runs = [[written(model, inputs, new, **way) for way in ways] for _ in range(3)]
        plain, assisted = (statistics.median(run[i][1] for run in runs) for i in range(2))
        calls.clear()
        equal = written(model, inputs, new, **ways[1])[0] == runs[0][0][0] == runs[0][1][0]
        ratios.append(plain / assisted if equal else 0.0)
        print(
            f"{name:18} {inputs.input_ids.shape[1]:4} tokens + {new}  {'equal' if equal else 'DIFFERENT'}  plain "
            f"{plain:.2f} s  lookup {assisted:.2f} s  ratio {plain / assisted:.2f}  calls {len(calls)}",
            flush=True,
        )
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--new", type=int, default=128, help="tokens to write")
    parser.add_argument("--lookup", type=int, default=10, help="tokens that lookup proposes at a time")
    parser.add_argument("--least", type=float, default=1.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ratios = []
    for folder in asked.folders:
        print(folder)
        ratios += compare(folder, asked.new, asked.lookup)
    return int(min(ratios) < asked.least)


if __name__ == "__main__":
    sys.exit(main())
