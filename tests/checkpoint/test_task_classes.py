"""Heads that are trained anew, classifiers and reward models, on converted models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from models import Zoo, copied, tokens

from linearize.checkpoint.code import MODELING_FILE, TASKS, auto_map, modeling
from linearize.checkpoint.known_code import known_files
from linearize.checkpoint.manifest import read_plan
from linearize.checkpoint.provenance import check_code, natives_of
from linearize.errors import Exit, LinearizeError


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_classifier_of_a_converted_model_trains_and_is_saved(zoo: Zoo, tmp_path: Path, name: str) -> None:
    """Its body is the converted one, and keeps its mixers; AutoModel by itself makes no softmax of its config."""
    folder, auto = zoo.folders(name)[1], transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, trust_remote_code=True, num_labels=3)
    ids, body = tokens(2, 20), zoo.model(name)
    theirs = body.base_model(ids).last_hidden_state
    assert torch.equal(model.eval().base_model(ids).last_hidden_state, theirs)
    assert not torch.allclose(transformers.AutoModel.from_pretrained(zoo.folders(name)[0])(ids)[0], theirs, atol=1e-2)
    with pytest.raises(ValueError, match=r"Unrecognized|trust_remote_code"):
        transformers.AutoModel.from_config(model.config)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(ids, labels=torch.tensor([0, 2])).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert model(ids, labels=torch.tensor([0, 2])).loss < loss
    model.save_pretrained(tmp_path / "saved")
    again = auto.from_pretrained(tmp_path / "saved", trust_remote_code=True).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_auto_classes_are_those_of_the_source(zoo: Zoo) -> None:
    """Those whose body is called as the causal model's is: of Llama's for question answering it is not."""
    natives = natives_of(read_plan(zoo.folders("llama")[1]))
    assert [*natives.tasks] == [name for name in TASKS if "Question" not in name]
    assert natives.tasks.keys() <= auto_map(natives).keys()


def test_a_folder_without_them_is_linearizes_own(zoo: Zoo, tmp_path: Path) -> None:
    """As this version wrote it before; of a folder that names a task, its code must have it."""
    folder = copied(zoo.folders("llama")[1], tmp_path / "before")
    plan = read_plan(folder)
    natives, config = natives_of(plan), json.loads((folder / "config.json").read_text())
    texts = {path.name: path.read_text() for path in folder.glob("*.py")}
    version = next(iter(known_files()))
    (folder / MODELING_FILE).write_text(modeling(version, plan, natives.without_tasks, texts))
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map(natives.without_tasks)}))
    check_code(folder, trust_remote_code=False)
    entries = auto_map(natives) | {"AutoModelForQuestionAnswering": "modeling_linearized.Other"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": entries}))
    with pytest.raises(LinearizeError, match=r"config\.json") as refused:
        check_code(folder, trust_remote_code=False)
    assert refused.value.code == Exit.INCOMPATIBLE
