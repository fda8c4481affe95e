"""The embedded demo: a small pretrained model and the text that every CPython carries."""

from pathlib import Path


def model_folder() -> Path:
    """Where the shipped model and its tokenizer lie."""
    return Path(__file__).parent / "model"
