"""Whether a tokenizer makes the same tokens beside another model type. transformers chooses its class by that: one that
brings a rule of its own for splitting text (Qwen3.5's, Qwen2's) does not read the rule in tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from ..errors import Exit, LinearizeError
from ..measure.generate import load_tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Texts that rules split differently: numbers and contractions, marks above and below letters, letters without spaces.
TEXTS = {
    "English": "They've found 1,234,567 rows in 2026: isn't that (almost) enough?\n\n  - Yes!",
    "code": 'def f(x_1: int) -> str:\n\treturn f"{x_1:>08.3f}"  # 100%\r\n',
    "German": "Über 30.000 Größen für 5 €; straßenweise.",
    "combined accents": "cafe\u0301, man\u0303ana, A\u030angstro\u0308m",
    "Chinese": "他们在2026年找到了1234行。",
    "Thai": "สวัสดีชาวโลก นี่คือการทดสอบ",
    "Arabic": "السَّلامُ عَلَيْكُمْ وَرَحْمَةُ اللَّهِ",
    "Hindi": "यह एक छोटी-सी परीक्षा है।",
}


def other_tokens(written: Path, source: Path, trust_remote_code: bool, called: str = "DIR") -> str:
    """What to know where AutoTokenizer makes other tokens for the folder `written`, which will be `called` so, than for
    `source`; empty where it makes the same, and where there is no tokenizer."""
    if not any((written / name).exists() for name in FILES):
        return ""
    theirs = load_tokenizer(source, trust_remote_code)
    ours = load_tokenizer(written, False)
    other = [name for name, text in TEXTS.items() if ids(ours, text) != ids(theirs, text)]
    if not other:
        return ""
    same = not splits_otherwise(written, theirs)
    cure = f"PreTrainedTokenizerFast.from_pretrained({called!r})" if same else "the model's own folder"
    return (
        f"AutoTokenizer of transformers {transformers.__version__} makes other tokens of it than of the model "
        f"({type(ours).__name__}, not {type(theirs).__name__}), in {', '.join(other)}. Read it with {cure}"
    )


def check_rule(folder: Path, name: str, trust_remote_code: bool) -> None:
    """Raise LinearizeError (exit 3) where the model's tokens are not those of its tokenizer.json, which GGUF gets."""
    there = (folder / "tokenizer.json").exists()
    if there and splits_otherwise(folder, load_tokenizer(folder, trust_remote_code)):
        message = "transformers reads its tokenizer by another rule than that of tokenizer.json, which gguf would get"
        raise LinearizeError(f"{name} is not exact as gguf: {message}", Exit.INCOMPATIBLE)


def splits_otherwise(folder: Path, tokenizer: Any) -> bool:
    """Whether the file tokenizer.json in a folder, as it is, makes other tokens than a tokenizer."""
    plain = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return any(ids(plain, text) != ids(tokenizer, text) for text in TEXTS.values())


def ids(tokenizer: Any, text: str) -> list[int]:
    """Its tokens of a text, without any around it."""
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found
