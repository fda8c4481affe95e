"""The Python API: what it promises stays, it is cheap to import, and it does what the commands do."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import base, byte_tokenizer, stage, write_recipe

from linearize import api
from linearize.errors import Exit, LinearizeError
from linearize.plan.keep import Choice

# The promise of linearize/api.py, as of 0.2: who changes a line here breaks it.
CONVERSION = (
    "layers='all', keep_softmax='', options=None, allow_drop=(), dtype='keep', revision=None, trust_remote_code=False"
)
PROMISED = {
    "plan": f"(model, mechanism, *, {CONVERSION}, restore='', keep_heads='', kept_window=None)",
    "convert": f"(model, mechanism, output, *, {CONVERSION}, copy=False, overwrite=False, verify='auto', seed=0, "
    "say=None, restore='', keep_heads='', kept_window=None)",
    "finetune": "(recipe, overrides=(), *, resume='auto', stage=None, max_steps=None, say=None)",
    "evaluate": "(student, teacher, *, recipe='demo', overrides=(), lengths=(256, 512, 1024), trials=32, seed=0, "
    "batch_tokens=8192, device='auto', dtype='keep', trust_remote_code=False, generate=0)",
    "load": "(model, *, device='auto', dtype='keep', revision=None, trust_remote_code=False)",
}


# And what it returns: keys and types. A list has the keys of its rows.
FINETUNED = {
    "output": str,
    "teacher_ppl": float,
    "stages": [{"name": str, "tokens": int, "ppl": float, "ppl_ratio": float, "kl": float}],
    "layers": [{"layer": int, "relative_mse": float, "cosine": float}],
}
RECALLED = {"accuracy": float, "loss": float}
EVALUATED = {
    "read": int,
    "tokens": int,
    "student_ppl": float,
    "teacher_ppl": float,
    "ppl_ratio": float,
    "kl": float,
    "top1_agreement": float,
    "recall": [{"length": int, "student": RECALLED, "teacher": RECALLED}],
    "needle": [{"length": int, "student": RECALLED, "teacher": RECALLED}],
    "state": [{"length": int, "student": int, "teacher": int}],
    "state_dtype": str,
}
PLANNED = {"steps": tuple, "kept": tuple, "notes": list}


def check_form(found: Any, promised: Any, where: str) -> None:
    """Every promised key is there, with a value of that type."""
    if isinstance(promised, dict):
        assert promised.keys() <= found.keys(), (where, promised.keys() - found.keys())
        for key, form in promised.items():
            check_form(found[key], form, f"{where}.{key}")
    elif isinstance(promised, list):
        assert found, where
        for one in found:
            check_form(one, promised[0], f"{where}[]")
    else:
        assert type(found) is promised, (where, type(found))


def names_in(form: Any) -> set[str]:
    """All keys of a form."""
    if isinstance(form, list):
        return names_in(form[0])
    return (
        set(form) | {name for value in form.values() for name in names_in(value)} if isinstance(form, dict) else set()
    )


@pytest.mark.parametrize(("function", "form"), [("finetune", FINETUNED), ("evaluate", EVALUATED), ("plan", PLANNED)])
def test_what_is_returned_is_documented(function: str, form: Any) -> None:
    returns = (inspect.getdoc(getattr(api, function)) or "").split("Returns:")[1].split("Raises:")[0]
    page = (Path(__file__).parents[1] / "docs/python.md").read_text()
    for name in names_in(form):
        assert f"`{name}`" in returns, (function, name)
        assert f"`{name}`" in page, (function, name)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted base with a tokenizer, beside its source in `source`."""
    return base(tmp_path_factory.mktemp("bases"), "llama")


def test_what_was_promised_stays() -> None:
    assert sorted(api.__all__) == ["LinearizeError", *sorted(PROMISED)]
    for name, promised in PROMISED.items():
        signature = inspect.signature(getattr(api, name))
        bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
        assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == promised


def test_every_argument_is_typed_and_documented() -> None:
    for name in PROMISED:
        function = getattr(api, name)
        about = inspect.getdoc(function) or ""
        for one in inspect.signature(function).parameters.values():
            assert one.annotation is not inspect.Parameter.empty
            assert f"    {one.name}: " in about, (name, one.name)
        assert all(f"\n{part}:\n" in about for part in ("Args", "Returns", "Raises"))


def test_importing_the_api_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, linearize.api; print({'torch', 'transformers', 'pydantic'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_plan_writes_nothing_and_a_conversion_follows_it(linear: Path, tmp_path: Path) -> None:
    source, told = linear.parent / "source", list[str]()
    planned = api.plan(source, "gsa", keep_softmax="1", options={"slots": 8})
    assert [step.site.layer for step in planned.steps] == [0]
    check_form({name: getattr(planned, name) for name in PLANNED}, PLANNED, "plan")
    assert planned.steps[0].new_parameters > 0
    assert planned.cache_bytes(64).keys() == {"source", "converted"}
    assert api.plan(source, "gsa", keep_heads="1:0", options={"slots": 8}).softmax_groups == [(1, 0)]
    assert not list(tmp_path.iterdir())
    folder = api.convert(
        source, "gsa", tmp_path / "out", keep_softmax="1", options={"slots": 8}, verify="none", say=told.append
    )
    assert json.loads((folder / "linearize.json").read_text())["plan"]["steps"][0]["options"]["slots"] == 8
    assert told
    with pytest.raises(LinearizeError) as refused:
        api.convert(source, "gsa", folder)
    assert refused.value.code == Exit.USAGE
    with pytest.raises(LinearizeError, match=r"choose.*none"):
        api.convert(source, "gsa", tmp_path / "other", verify="some")  # type: ignore[arg-type]


def test_layers_are_chosen_where_that_is_asked(linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(
        scoring: Any, plan: Any, source: Any, natives: Any, asked: str, count: int, units: Any, local: Any
    ) -> Choice:
        return dataclasses.replace(Choice.unscored(asked, units, 2), kept=(1,))

    monkeypatch.setattr("linearize.choose.choose.choose", choose)
    source = linear.parent / "source"
    assert [site.layer for site in api.plan(source, "gsa", keep_softmax="auto:1").kept] == [1]
    folder = api.convert(source, "gsa", tmp_path / "out", keep_softmax="auto:1", verify="none", say=lambda text: None)
    assert [site["layer"] for site in json.loads((folder / "linearize.json").read_text())["plan"]["kept"]] == [1]


def test_a_model_that_was_distilled_by_the_api_loads_and_is_measured(
    linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    recipe = write_recipe(tmp_path, linear, stage("attention_transfer"))
    overrides = {"stages[0].steps": 2, "output_dir": str(tmp_path / "run"), "data.eval": {"files": ["heldout.txt"]}}
    report = api.finetune(recipe, {**overrides, "eval.max_tokens": 64}, say=lambda text: None)
    assert report["stages"][-1]["tokens"] == 128
    check_form(report, FINETUNED, "finetune")
    model, tokenizer = api.load(report["output"], device="cpu")
    assert not model.training
    assert len(tokenizer) == len(byte_tokenizer())
    inputs = torch.tensor([tokenizer("abc def")["input_ids"]])
    assert model(input_ids=inputs).logits.isfinite().all()
    text = ["data.train={files: [" + json.dumps(str(tmp_path / "heldout.txt")) + "]}"]
    text += ["data.eval={files: [" + json.dumps(str(tmp_path / "heldout.txt")) + "]}", "data.pack.seq_len=64"]
    result = api.evaluate(
        report["output"], linear.parent / "source", overrides=text, lengths=[512], trials=2, device="cpu", generate=1
    )
    check_form(result, EVALUATED, "evaluate")
    assert result["kl"] >= 0
    assert result["teacher_ppl"] > 1
    assert [row["length"] for row in result["needle"]] == [512]
    assert result["generated"]["rows"] == 1
    assert 0 <= result["generated"]["student"]["recall"] <= 1


def test_overrides_that_are_one_text_are_refused() -> None:
    with pytest.raises(LinearizeError, match="give a list"):
        api.finetune("gsa", "model.base=DIR")


def test_a_taken_output_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    """Planning may measure layers for minutes."""
    (tmp_path / "mine.txt").touch()
    with pytest.raises(LinearizeError, match="has 1 file already"):
        api.convert(tmp_path / "no model", "gsa", tmp_path, keep_softmax="auto:2")
