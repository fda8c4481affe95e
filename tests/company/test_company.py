"""Tools of others take a converted model as they take its source: Trainer, PEFT, TRL, lm-evaluation-harness, pipelines.

Each test trains or measures a small model for a moment; what a tool saves goes back into linearize.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from models import convert_folder
from training import BYTES, base, byte_tokenizer, make_recipe, small_source, stage, text, train
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    GPT2Tokenizer,
    Trainer,
    TrainingArguments,
    pipeline,
)
from typer.testing import CliRunner

from linearize import api
from linearize.cli import app

SENTENCES = [text(20, seed) for seed in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model with a tokenizer, its source beside it."""
    return base(tmp_path_factory.mktemp("bases"), "llama", layers="0")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def tokenizer() -> Any:
    made = byte_tokenizer()
    made.pad_token = made.eos_token
    return made


def settings(output: Path) -> dict[str, Any]:
    """Arguments of every trainer: two steps on the CPU, and nothing beside them."""
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    return {"output_dir": str(output), "max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, **quiet}


def losses(trainer: Any) -> list[float]:
    """What a trainer logged, finite numbers only."""
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found
    assert all(torch.tensor(found).isfinite())
    return found


def comes_back(saved: Path, tmp_path: Path) -> None:
    """finetune, eval and push take the folder that a tool saved."""
    recipe = make_recipe(tmp_path / "back", saved, stage("attention_transfer", steps=1))
    assert train(recipe)["output"]
    invoke = CliRunner().invoke
    pushed = invoke(app, ["push", str(saved), "user/repo", "--dry-run", "--json"])
    assert pushed.exit_code == 0, pushed.output
    assert "linearize.json" in json.loads(pushed.stdout.splitlines()[-1])["upload"]["files"]
    held = f"data.eval={{files: [{json.dumps(str(tmp_path / 'back' / 'heldout.txt'))}]}}"
    options = [
        "--teacher",
        str(saved),
        "--lengths",
        "512",
        "--trials",
        "1",
        held,
        "data.pack.seq_len=64",
        "--device",
        "cpu",
    ]
    measured = invoke(app, ["eval", str(saved), *options])
    assert measured.exit_code == 0, measured.output


# ---------------------------------------------------------------- transformers


def test_a_pipeline_writes_what_generate_writes(folder: Path) -> None:
    writes = pipeline("text-generation", model=str(folder), trust_remote_code=True, device="cpu")
    found = writes("abc def", max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"]
    model, ids = load(folder), byte_tokenizer()("abc def", return_tensors="pt")["input_ids"]
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert found == byte_tokenizer().decode(wanted, skip_special_tokens=True)


# What a clean process prints that gets no answers: the class of each folder's tokenizer, its numbers, and what
# transformers asked meanwhile, without a word about trust and with one.
TOKENIZE = """
import contextlib, io, json, sys
from transformers import AutoTokenizer
for folder in sys.argv[1:]:
    for given in ({"trust_remote_code": False}, {}):
        with contextlib.redirect_stdout(io.StringIO()) as asked:
            made = AutoTokenizer.from_pretrained(folder, **given)
        print(json.dumps([type(made).__name__, made("abc def")["input_ids"], asked.getvalue()]))
"""


def with_tokenizer(place: Path, kind: str, named: bool) -> list[str]:
    """A source with a tokenizer of that class, which its files may not name, and what it is converted to."""
    source = small_source(place / "source", "gpt2" if kind == "GPT2Tokenizer" else "llama")
    if kind == "GPT2Tokenizer":
        vocabulary = {one: place for place, one in enumerate(BYTES)}
        GPT2Tokenizer(vocab=vocabulary, merges=[], unk_token="a", eos_token="a").save_pretrained(source)
    settings = source / "tokenizer_config.json"
    values = json.loads(settings.read_text())
    assert values["tokenizer_class"] == kind
    if not named:
        settings.write_text(json.dumps({key: value for key, value in values.items() if key != "tokenizer_class"}))
    folder = convert_folder(source, place / "linear", "all")
    assert "AutoTokenizer.from_pretrained(name)" in (folder / "README.md").read_text()
    return [str(source), str(folder)]


@pytest.mark.slow
def test_a_tokenizer_needs_no_code_and_asks_nothing(tmp_path: Path) -> None:
    """Also where the source's files do not name its class, as those of GPT-2 do not."""
    cases = [(kind, named) for kind in ("TokenizersBackend", "GPT2Tokenizer") for named in (True, False)]
    folders = [with_tokenizer(tmp_path / f"{kind}-{named}", kind, named) for kind, named in cases]
    command = [sys.executable, "-I", "-c", TOKENIZE, *chain(*folders)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for number, (kind, _) in enumerate(cases):
        found = lines[4 * number : 4 * number + 4]
        assert found == 4 * [found[0]]
        assert (found[0][0], found[0][2]) == (kind, "")


def test_the_card_trusts_the_code_of_a_tokenizer_that_has_some(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source", "llama")
    settings = source / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | own))
    (source / "own.py").write_text("from transformers import PreTrainedTokenizerFast as Own\n")
    card = (convert_folder(source, tmp_path / "linear", trust_remote_code=True) / "README.md").read_text()
    assert "AutoTokenizer.from_pretrained(name, trust_remote_code=True)" in card


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainer_trains_saves_and_goes_on(folder: Path, tmp_path: Path, checkpointing: bool) -> None:
    rows = [{"input_ids": ids, "labels": ids} for ids in byte_tokenizer()([one[:40] for one in SENTENCES])["input_ids"]]

    def trainer(steps: int) -> Trainer:
        torch.manual_seed(0)
        given = settings(tmp_path) | {
            "max_steps": steps,
            "save_strategy": "steps",
            "save_steps": 1,
            "learning_rate": 1e-2,
        }
        arguments = TrainingArguments(**given, gradient_checkpointing=checkpointing)
        return Trainer(load(folder), arguments, train_dataset=Dataset.from_list(rows))

    whole = trainer(2)
    whole.train()
    assert losses(whole)[0] > 0
    resumed = trainer(2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert losses(resumed)[-1] == pytest.approx(losses(whole)[-1], rel=1e-5)
    if not checkpointing:
        byte_tokenizer().save_pretrained(tmp_path / "checkpoint-2")
        comes_back(tmp_path / "checkpoint-2", tmp_path)


def test_trainer_accumulates_what_one_batch_has(folder: Path, tmp_path: Path) -> None:
    """Rows of several lengths: the mean is over all their tokens, whatever the batches are."""
    rows = [
        {"input_ids": ids, "labels": ids} for ids in byte_tokenizer()([one[:40] for one in SENTENCES[:4]])["input_ids"]
    ]
    rows = [{name: ids[: 10 * (number + 1)] for name, ids in row.items()} for number, row in enumerate(rows)]
    found = []
    for size, times in ((4, 1), (1, 4), (2, 2)):
        given = settings(tmp_path) | {"per_device_train_batch_size": size, "gradient_accumulation_steps": times}
        arguments = TrainingArguments(**given, optim="sgd", learning_rate=0.1, max_grad_norm=0.0)
        collate = DataCollatorForSeq2Seq(tokenizer())
        trainer = Trainer(load(folder), arguments, train_dataset=Dataset.from_list(rows), data_collator=collate)
        trainer.train()
        found.append((losses(trainer), torch.cat([p.detach().flatten() for p in trainer.model.parameters()])))
    for logged, weights in found[1:]:
        assert logged == pytest.approx(found[0][0], rel=1e-5)
        assert (weights - found[0][1]).abs().max() < 1e-5


# ---------------------------------------------------------------- PEFT


def test_peft_trains_and_merges(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    ids = byte_tokenizer()(SENTENCES[0], return_tensors="pt")["input_ids"]
    model = get_peft_model(load(folder), LoraConfig(r=2, task_type="CAUSAL_LM"))  # PEFT's own choice for the type
    assert {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad} == {"q_proj", "v_proj"}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    adapted = model.eval()(input_ids=ids).logits
    assert not torch.allclose(adapted, load(folder)(input_ids=ids).logits, atol=1e-4)
    plain, trains = load(folder), [p.requires_grad for p in model.parameters()]
    with plain.teacher(), model.teacher(), torch.no_grad():  # the source's adapters are none
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert torch.equal(model(input_ids=ids).logits, adapted)
    assert [p.requires_grad for p in model.parameters()] == trains
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval()
    assert torch.allclose(again(input_ids=ids).logits, adapted, atol=1e-5)
    merged = again.merge_and_unload()
    assert torch.allclose(merged(input_ids=ids).logits, adapted, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    byte_tokenizer().save_pretrained(tmp_path / "merged")
    comes_back(tmp_path / "merged", tmp_path)


@pytest.mark.parametrize("mechanism", ["gsa", "gla", "gdn", "mhla", "retnet"])
def test_peft_adapts_all_projections(mechanism: str, tmp_path: Path) -> None:
    """As the card says: those of attention, and those of the mechanism, a gate of its output among them."""
    from peft import LoraConfig, get_peft_model

    source = small_source(tmp_path / "source", "llama")
    options = {} if mechanism == "gsa" else {"output_gate": True}
    folder = api.convert(source, mechanism, tmp_path / "linear", options=options, verify="none", say=lambda text: None)
    assert 'LoraConfig(target_modules="all-linear")' in (folder / "README.md").read_text()
    linear = load(folder)
    own = {name for name, module in linear.named_modules() if ".mixer." in name and isinstance(module, torch.nn.Linear)}
    assert own or mechanism == "mhla"
    model = get_peft_model(linear, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    ids = byte_tokenizer()(SENTENCES[0], return_tensors="pt")["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    moved = {
        name.removeprefix("base_model.model.").partition(".lora_B")[0]
        for name, parameter in model.named_parameters()
        if ".lora_B" in name and parameter.grad is not None and parameter.grad.any()
    }
    attention = {f"model.layers.{n}.self_attn.{p}_proj" for n in (0, 1) for p in "qkvo"}
    assert attention | own <= moved


# ---------------------------------------------------------------- TRL


def test_trl_sft(folder: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    given = trl.SFTConfig(**settings(tmp_path / "sft"), packing=True, max_length=64, loss_type="nll")
    rows = Dataset.from_list([{"text": one} for one in SENTENCES])
    trainer = trl.SFTTrainer(load(folder), given, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    losses(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    comes_back(tmp_path / "saved", tmp_path)


def test_trl_sft_packs_documents_apart(folder: Path) -> None:
    """Packed rows have positions that begin anew: the loss is that of the documents alone."""
    model = load(folder)
    parts = [torch.tensor(ids[:20]) for ids in byte_tokenizer()(SENTENCES[:2])["input_ids"]]
    positions = torch.cat([torch.arange(20)] * 2)[None]
    packed = model(input_ids=torch.cat(parts)[None], position_ids=positions, use_cache=False).logits[0]
    alone = torch.cat([model(input_ids=part[None]).logits[0] for part in parts])
    assert torch.allclose(packed, alone, atol=1e-4)


@pytest.mark.slow
def test_trl_dpo(folder: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    rows = [{"prompt": "say ", "chosen": one[:20], "rejected": one[20:40]} for one in SENTENCES]
    given = trl.DPOConfig(**settings(tmp_path), max_length=64)
    trainer = trl.DPOTrainer(
        load(folder), load(folder), given, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(0.6931, abs=1e-2)  # log 2: student and reference are one at first
    trainer.save_model(str(tmp_path / "saved"))
    comes_back(tmp_path / "saved", tmp_path)


@pytest.mark.slow
def test_trl_grpo(folder: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    rows = Dataset.from_list([{"prompt": one[:10]} for one in SENTENCES])
    given = trl.GRPOConfig(**settings(tmp_path), num_generations=2, max_completion_length=8)
    trainer = trl.GRPOTrainer(
        load(folder),
        reward_funcs=lambda completions, **_: [float(len(set(one))) for one in completions],
        args=given,
        train_dataset=rows,
        processing_class=tokenizer(),
    )
    trainer.train()
    losses(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    comes_back(tmp_path / "saved", tmp_path)


# ---------------------------------------------------------------- lm-evaluation-harness


def request(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_lm_eval_scores_choices_texts_and_generation(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    measure = HFLM(pretrained=str(folder), trust_remote_code=True, device="cpu", batch_size=2, max_length=128)
    model, encode = load(folder), byte_tokenizer()

    def log_likelihood(context: str, continuation: str) -> float:
        before, whole = (encode(one)["input_ids"] for one in (context, context + continuation))
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
        return float(sum(scores[place - 1, whole[place]] for place in range(len(before), len(whole))))

    choices = [("abc", " def"), ("abc", " a longer one"), ("x y z", " def")]
    found = measure.loglikelihood([request("loglikelihood", *one) for one in choices], disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([log_likelihood(*one) for one in choices], abs=1e-3)
    (rolling,) = measure.loglikelihood_rolling([request("loglikelihood_rolling", SENTENCES[0][:60])], disable_tqdm=True)
    assert rolling == pytest.approx(log_likelihood("<eos>", SENTENCES[0][:60]), rel=1e-3)
    (written,) = measure.generate_until(
        [request("generate_until", "abc def", {"until": ["\n"], "max_gen_toks": 8})], disable_tqdm=True
    )
    ids = encode("abc def", return_tensors="pt")["input_ids"]
    wanted = encode.decode(
        model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :], skip_special_tokens=True
    )
    assert written == wanted.split("\n")[0]
