"""What the tests of training share: a base with a tokenizer, recipes as Python values, and runs in this process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import convert_folder, small_model
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from linearize.finetune import finetune
from linearize.recipe.recipe import Recipe, load_recipe
from linearize.train.session import Finetuner

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS, VOCAB = len(BYTES), len(BYTES) + 1
T = 32
SMALL = {"vocab_size": VOCAB, "eos_token_id": EOS, "bos_token_id": EOS}
BASES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_hidden_layers": 2, "tie_word_embeddings": True},
    "gpt2": {**SMALL, "n_layer": 2, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    "qwen3": {**SMALL, "num_hidden_layers": 2},  # its head is apart
}
LORA = {
    "qwen3": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "lm_head"]},
    "llama": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj", "o_proj"]},
    "gpt2": {"r": 2, "alpha": 4, "target_modules": ["c_attn"]},
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
# Runs the command line with one function replaced by one that sends a signal to this process; of several, to one.
AT = """
import os, signal, sys
from linearize import cli, finetune
from linearize.train import loop, runs
kind, place, number = signal.Signals[sys.argv[1]], sys.argv[2], int(sys.argv[3])
def now():
    if os.environ.get("RANK") in (None, "1"):
        os.kill(os.getpid(), kind)
calls = 0
def counted(original, during):
    def function(*arguments, **named):
        global calls
        calls += 1
        if calls == number and not during:
            now()
        result = original(*arguments, **named)
        if calls == number and during:
            now()
        return result
    return function
if place == "step":
    loop.StageLoop._update = counted(loop.StageLoop._update, True)
elif place == "write":
    save = runs.Run.save
    def half(self, position, write):
        return save(self, position, counted(write, True))
    runs.Run.save = half
elif place == "end":
    finetune.save_final = counted(finetune.save_final, False)
sys.argv = ["linearize", "finetune", *sys.argv[4:]]
cli.main()
"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end of text."""
    tokenizer = Tokenizer(models.BPE(vocab={b: i for i, b in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=TEMPLATE)


def base(root: Path, name: str, dtype: str = "float32", layers: str = "all", **options: Any) -> Path:
    """A converted base with a tokenizer, beside its source; made once."""
    place = root / "-".join([name, dtype, layers, *map(str, options.values())])
    if (place / "linear").exists():
        return place / "linear"
    return convert_folder(small_source(place / "source", name, dtype), place / "linear", layers, options=options)


def small_source(folder: Path, name: str, dtype: str = "float32") -> Path:
    """A small random model that is not converted, with a tokenizer."""
    small_model(name, **BASES[name]).to(getattr(torch, dtype)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def text(words: int = 1500, seed: int = 5) -> str:
    """Documents of a language with few words, so that a few steps learn something."""
    generator = random.Random(seed)
    vocabulary = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 5))) for _ in range(40)]
    return " ".join(generator.choice(vocabulary) for _ in range(words))


def write_data(folder: Path) -> None:
    """train.jsonl (many short documents), short.txt (two blocks), heldout.txt and chat.jsonl."""
    lines = [json.dumps({"text": text(25, seed)}) for seed in range(40)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "short.txt").write_text(text()[: 2 * T - 1])
    (folder / "heldout.txt").write_text(text(300, 99))
    chats = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": text(2, i)}] for i in range(30)]
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))


def stage(kind: str, train: Any = "new", model: str = "llama", **changes: Any) -> dict[str, Any]:
    """A stage of 4 steps, two blocks each, with LoRA settings when it trains LoRA."""
    parts = [train] if isinstance(train, str) else train
    lora = {"lora": LORA[model]} if "lora" in parts else {}
    budget = {} if {"tokens", "epochs"} & changes.keys() else {"steps": 4}
    default = {"optimizer": {"lr": 1e-2}, "batch": {"per_device": 2}}
    return {"kind": kind, "train": parts, **default, **lora, **budget, **changes}


def recipe_values(folder: Path, model: Path, *stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A recipe for a converted model whose run goes to folder/run."""
    return {
        "version": 1,
        "name": "tiny",
        "output_dir": str(folder / "run"),
        "model": {"base": str(model)},
        "data": {"train": {"files": ["train.jsonl"]}, "pack": {"seq_len": T}},
        "stages": list(stages),
        "runtime": {"device": "cpu"},
        "finish": {"verify": False},
        **changes,
    }


def write_recipe(folder: Path, model: Path, *stages: dict[str, Any], **changes: Any) -> Path:
    """The recipe file, with data beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "train.jsonl").exists():
        write_data(folder)
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe_values(folder, model, *stages, **changes), indent=2))  # YAML as well
    return path


def make_recipe(folder: Path, model: Path, *stages: dict[str, Any], **changes: Any) -> Recipe:
    """`write_recipe`, read back."""
    return load_recipe(write_recipe(folder, model, *stages, **changes))


@contextmanager
def killed_after(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within: a run is interrupted where it would save a later step."""
    save = Finetuner.save

    def killed(tuner: Finetuner, position: Any, state: Any) -> None:
        if position.step > step:
            raise KeyboardInterrupt
        save(tuner, position, state)

    with monkeypatch.context() as patch:
        patch.setattr(Finetuner, "save", killed)
        yield


def train(recipe: Recipe, **arguments: Any) -> dict[str, Any]:
    """`linearize finetune` in this process, in silence."""
    return finetune(recipe, say=lambda line: None, **arguments)


def metrics(folder: Path, key: str = "loss") -> list[Any]:
    """That key of every line of metrics.jsonl that has it."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[key] for line in lines if key in json.loads(line)]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model folder."""
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Bit-equal, tensor by tensor."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
