"""Several copies of the kernel files in one process: each checkpoint computes with its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import HYBRID, convert_folder, load, logits, save_source, source_with_mixers, tokens
from torch import Tensor

from linearize_kernels.hf.attention_hooks import mixers_of

COPIES = ("one", "two")
# What the second checkpoint's copies do differently: how fast slots decay, and what attention_hooks.py hands back.
EDITS = (
    ("gates.py", "F.logsigmoid(y) / damping", "F.logsigmoid(y) / (3.0 * damping)"),
    ("attention_hooks.py", "return o.to(query.dtype), None", "return 0.5 * o.to(query.dtype), None"),
)


@pytest.fixture(scope="module", params=["all", HYBRID])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one source, in folders of the same name, whose code differs."""
    place = tmp_path_factory.mktemp("copies")
    source = save_source(place / "source")
    made = {name: convert_folder(source, place / name / "model", request.param) for name in COPIES}
    for file, old, new in EDITS:
        text = (made["two"] / file).read_text("utf-8")
        assert text.count(old) == 1, f"{file} no longer has {old}"
        (made["two"] / file).write_text(text.replace(old, new), "utf-8")
    return made | {"source": source}


def by_hand(folders: dict[str, Path], name: str) -> Tensor:
    """Expected logits: the package's code, and for checkpoint two its edits made by other means."""
    model = source_with_mixers(folders["source"], folders["one"])
    for mixer in mixers_of(model).values():
        if name == "two":
            mixer.damping *= 3.0
            mixer.mix = functools.partial(halved, mixer.mix)
    return logits(model, tokens(2, 14))


def halved(mix: Callable[..., tuple[Tensor, Any]], *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    o, state = mix(*args, **kwargs)
    return 0.5 * o, state


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
@pytest.mark.parametrize("package", ["first", "last"])
def test_each_copy_keeps_its_own_results(folders: dict[str, Path], order: tuple[str, str], package: str) -> None:
    ids, models = tokens(2, 14), {}
    if package == "first":
        models["package"] = source_with_mixers(folders["source"], folders["one"])
    for name in order:
        models[name] = load(folders[name])
    if package == "last":
        models["package"] = source_with_mixers(folders["source"], folders["one"])
    one, two = by_hand(folders, "one"), by_hand(folders, "two")
    assert not torch.allclose(one, two, atol=1e-3)
    # Each runs after all are there, and again after the others ran.
    for _ in range(2):
        found = {name: logits(model, ids) for name, model in models.items()}
        assert torch.equal(found["one"], found["package"])
        assert torch.allclose(found["one"], one, atol=1e-5)
        assert torch.allclose(found["two"], two, atol=1e-5)
    for name, model in models.items():
        if name != "package":
            out = model.generate(
                ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
            whole = logits(model, out.sequences[:, :-1])[:, 13:]
            assert torch.allclose(torch.stack(out.logits, 1), whole, atol=1e-4)


def test_one_cache_may_be_made_by_another_copy(folders: dict[str, Path]) -> None:
    """A state is recognised by what it can do, not by its class."""
    first, second = load(folders["one"]), load(folders["two"])
    ids = tokens(1, 6)
    with torch.no_grad():
        cache = first(ids, use_cache=True).past_key_values
        again = second(ids[:, :1], past_key_values=cache, use_cache=True)
    assert again.past_key_values.get_seq_length() == 7
