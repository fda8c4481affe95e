"""The demo: a small pretrained model that linearize ships, and text that every CPython carries."""

from pathlib import Path


def model_folder() -> Path:
    """Where the shipped model and its tokenizer lie."""
    return Path(__file__).parent / "model"
