"""Which class the tokenizer of a source has, where its own files do not say it.

transformers then takes the class from the class of the model's config. With trust_remote_code=True that is the folder's
own, so the tokenizer's class must stand in its tokenizer_config.json.
"""

from __future__ import annotations

from pathlib import Path

from transformers.models.auto.tokenization_auto import AutoTokenizer, tokenizer_class_from_name

from ..probe.trace import quiet
from .source import read_json

FILE = "tokenizer_config.json"
# One of these lies beside every tokenizer whose class transformers has to find.
FILES = (FILE, "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def unnamed_class(source: Path) -> str | None:
    """The name of that class; None where tokenizer_config.json leads to it, and where there is no tokenizer."""
    if not any((source / name).is_file() for name in FILES):
        return None
    try:
        with quiet():
            found = type(AutoTokenizer.from_pretrained(source, trust_remote_code=False))
    except Exception:  # it has code of its own, or is damaged, or its package is not here: it stays as it is
        return None
    named = read_json(source / FILE).get("tokenizer_class") if (source / FILE).is_file() else None
    if tokenizer_class_from_name(named or "TokenizersBackend") is found:
        return None
    return found.__name__ if tokenizer_class_from_name(found.__name__) is found else None
