"""The demo: a small pretrained model that linearize ships, and text that every CPython carries."""

from pathlib import Path

DEMO = "demo"  # what commands and recipes call the model

# Its texts, by their names in recipes, as a person would name them.
TEXTS = {
    "train": "Python's standard library without the held-out part",
    "heldout": "the held-out part of Python's standard library",
    "packages": "the source code of torch, transformers, accelerate and peft",
}
# About how many bytes they have, on CPython 3.11; of `packages` a run reads as much as it needs.
BYTES = {"train": 8_000_000, "heldout": 640_000}


def model_folder() -> Path:
    """Where the shipped model and its tokenizer lie."""
    return Path(__file__).parent / "model"


def named_base(name: str) -> str:
    """The folder or Hub id that a name stands for: `demo` is the model that linearize ships, ./demo a folder here."""
    return str(model_folder()) if name == DEMO else name
