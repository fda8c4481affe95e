"""What each kind of stage moves and what it leaves alone: teacher, frozen tensors, saved model."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TOLERANCE, relative_error
from models import load, small_model
from safetensors.torch import load_file, save_file
from training import LORA, VOCAB, T, base, make_recipe, metrics, same, stage, tensors, train, write_recipe
from transformers import AutoModelForCausalLM

from linearize.data.batches import check_source, open_processor
from linearize.errors import Exit, LinearizeError
from linearize.finetune import finetune
from linearize.measure.generate import load_any, load_tokenizer
from linearize.recipe.data import FileSource
from linearize.recipe.recipe import load_recipe
from linearize.train import save as export
from linearize.train.loop import StageLoop
from linearize.train.session import Finetuner
from linearize.train.student import Student

STAGES = [
    ("attention_transfer", ["new"]),
    ("attention_transfer", ["new", "lora"]),
    ("logit_kl", ["new"]),
    ("logit_kl", ["new", "lora"]),
    ("logit_kl", ["mixer"]),
    ("logit_kl", ["all"]),
    ("sft", ["lora"]),
    ("sft", ["all"]),
]
IDS = torch.randint(1, VOCAB, (2, T), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


class Watch:
    """A run looked at from inside: logits and weights before and after, and what had gradients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, save: bool = False) -> None:
        self.seen: list[dict[str, Any]] = []
        self.with_gradient: set[str] = set()
        self.trainable: list[set[str]] = []
        run_stages, update = Finetuner.train, StageLoop._update

        def watched_train(tuner: Finetuner, only: str | None = None) -> bool:
            self.look(tuner)
            complete = run_stages(tuner, only)
            self.look(tuner)
            return complete

        def watched_update(loop: StageLoop, *arguments: Any) -> None:
            named = dict(loop.owner.student.named_parameters())
            self.with_gradient |= {name for name, p in named.items() if p.grad is not None}
            self.trainable.append({name for name, p in named.items() if p.requires_grad})
            update(loop, *arguments)

        monkeypatch.setattr(Finetuner, "train", watched_train)
        monkeypatch.setattr(StageLoop, "_update", watched_update)
        if not save:
            monkeypatch.setattr("linearize.finetune.save_final", lambda *arguments: None)

    @torch.no_grad()
    def look(self, tuner: Finetuner) -> None:
        """Logits of teacher and student, and every tensor."""
        with tuner.student.as_teacher(), tuner.accelerator.autocast():
            teacher = tuner.model(input_ids=IDS, use_cache=False).logits.clone()
        tuner.model.eval()
        with tuner.accelerator.autocast():
            student = tuner.model(input_ids=IDS, use_cache=False).logits.clone()
        weights = {name: p.detach().clone() for name, p in tuner.student.named_parameters()}
        self.seen.append({"teacher": teacher, "student": student, "weights": weights})

    def moved(self) -> set[str]:
        """Names of tensors that differ at the end; adapters are new, and start with zeros as their second factor."""
        (before, after) = (view["weights"] for view in self.seen)
        old = {n for n in before if not torch.equal(after[n].float(), before[n].float())}
        return old | {n for n in after.keys() - before.keys() if after[n.replace("lora_A", "lora_B")].any()}


def source_logits(folder: Path, precision: str) -> torch.Tensor:
    """The source model's own, in the class that transformers ships, as training computes them."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "source", dtype=dtype).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return model(input_ids=IDS, use_cache=False).logits


def expected(name: str, model: str, parts: list[str], transfer: bool) -> bool:
    """Whether a stage that trains `parts` moves the tensor called `name`."""
    attention = ".self_attn." if model == "llama" else ".attn."
    if ".lora_" in name:
        # The loss of a transfer looks at attention before its output projection.
        return bool({"lora", "all"} & set(parts)) and not (transfer and "o_proj" in name)
    if ".mixer." in name:
        return parts != ["lora"]
    return "all" in parts or ("mixer" in parts and attention in name)


# Each stage on one model; a half-precision base, and a model with Conv1D and dropout, with those that differ there.
MOVES = [("llama", *stage, "fp32") for stage in STAGES]
MOVES += [("llama", "attention_transfer", ["new", "lora"], "bf16"), ("llama", "logit_kl", ["all"], "bf16")]
MOVES += [
    pytest.param("gpt2", "attention_transfer", ["new", "lora"], "fp32", marks=pytest.mark.slow),
    pytest.param("gpt2", "logit_kl", ["mixer"], "bf16", marks=pytest.mark.slow),
    pytest.param("gpt2", "sft", ["all"], "fp32", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "kind", "parts", "precision"), MOVES, ids=str)
def test_a_stage_moves_what_it_names_and_never_the_teacher(
    model: str, kind: str, parts: list[str], precision: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = base(root, model, "bfloat16" if precision == "bf16" else "float32")
    watch = Watch(monkeypatch)
    runtime = {"device": "cpu", "precision": precision}
    data = {"train": {"files": ["short.txt"]}, "pack": {"seq_len": T}}  # the same two blocks at every step
    train(make_recipe(tmp_path, folder, stage(kind, parts, model, steps=20), runtime=runtime, data=data))
    before, after = watch.seen
    assert torch.equal(before["teacher"], source_logits(folder, precision))
    assert torch.equal(after["teacher"], before["teacher"])
    assert relative_error(after["student"], before["student"]) > 1e-3
    names = {name for name in after["weights"] if expected(name, model, parts, kind == "attention_transfer")}
    assert watch.moved() == watch.with_gradient == names
    assert {after["weights"][name].dtype for name in names} == {torch.float32}  # masters, also of a bfloat16 model
    frozen = {name for name in after["weights"] if not expected(name, model, parts, False)}
    assert not any(frozen & trainable for trainable in watch.trainable)
    losses = metrics(tmp_path)
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize(
    ("model", "precision"), [("llama", "bf16"), pytest.param("gpt2", "fp32", marks=pytest.mark.slow)]
)
def test_the_teacher_stays_through_a_run_of_every_kind(
    model: str, precision: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = base(root, model, "bfloat16" if precision == "bf16" else "float32")
    watch = Watch(monkeypatch)
    kinds = [("attention_transfer", "new"), ("logit_kl", "mixer"), ("logit_kl", ["new", "lora"]), ("sft", "all")]
    stages = [stage(kind, parts, model, name=f"s{i}") for i, (kind, parts) in enumerate(kinds)]
    train(make_recipe(tmp_path, folder, *stages, runtime={"device": "cpu", "precision": precision}))
    assert torch.equal(watch.seen[1]["teacher"], source_logits(folder, precision))
    assert watch.moved() == watch.seen[1]["weights"].keys()


# ---------------------------------------------------------------- the saved model


def saved(model: str, parts: list[str], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any):
    """(converted base, final folder, logits of the trained student in memory)."""
    folder = base(root, model, changes.pop("dtype", "float32"), changes.pop("layers", "all"))
    watch = Watch(monkeypatch, save=True)
    train(make_recipe(tmp_path, folder, stage("logit_kl", parts, model), **changes))
    return folder, tmp_path / "run" / "final", watch.seen[1]["student"]


SAVED = [("llama", "all", ["new"]), ("llama", "all", ["new", "lora"]), ("llama", "0", ["mixer"])]
SAVED += [("llama", "0", ["all"])]
SAVED += [pytest.param("gpt2", "0", ["new", "lora"], marks=pytest.mark.slow)]
SAVED += [pytest.param("gpt2", "all", ["all"], marks=pytest.mark.slow)]


@pytest.mark.parametrize(("model", "layers", "parts"), SAVED, ids=str)
def test_the_saved_model_is_the_trained_one(
    model: str, parts: list[str], layers: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, final, logits = saved(model, parts, root, tmp_path, monkeypatch, layers=layers)
    reloaded = load(final)
    with torch.no_grad():
        assert relative_error(reloaded(input_ids=IDS, use_cache=False).logits, logits) < TOLERANCE[torch.float32]
    assert reloaded.get_output_embeddings().weight is reloaded.get_input_embeddings().weight
    old, new = tensors(folder), tensors(final)
    assert old.keys() == new.keys()
    for name in old:
        adapted = "lora" in parts and any(f".{t}.weight" in name for t in LORA[model]["target_modules"])
        converted = layers == "all" or ".0." in name
        moves = (expected(name, model, parts, False) and (parts == ["all"] or converted)) or adapted
        assert torch.equal(old[name], new[name]) != moves, name
    if parts == ["new"]:
        shard = "model-source-00001-of-00001.safetensors"
        assert (final / shard).samefile(folder / shard)


def test_bfloat16_is_saved_as_bfloat16(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = {"device": "cpu", "precision": "bf16"}
    _, final, logits = saved("llama", ["mixer"], root, tmp_path, monkeypatch, dtype="bfloat16", runtime=runtime)
    kinds = {name: t.dtype for name, t in tensors(final).items()}
    wide = {name for name, kind in kinds.items() if kind == torch.float32}
    assert {*kinds.values()} == {torch.bfloat16, torch.float32}
    assert wide == {name for name in kinds if name.endswith((".mixer.forget.bias", ".mixer.clock_strength"))}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = load(final, dtype=torch.bfloat16)(input_ids=IDS, use_cache=False).logits
    assert relative_error(ours, logits) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_float32_masters_leave_the_residual_stream_in_bfloat16(
    model: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the student as in the teacher; a stream in float32 takes twice the memory."""
    found, prepare = set[tuple[bool, torch.dtype]](), Student.prepare

    def watched(student: Student, *given: Any, **named: Any) -> Any:
        def look(module: Any, inputs: Any) -> None:
            found.add((torch.is_grad_enabled(), inputs[0].dtype))

        for layer in student.model.modules():
            if type(layer).__name__ in (*student.model._no_split_modules, "LlamaMLP", "GPT2MLP"):
                layer.register_forward_pre_hook(look)
        return prepare(student, *given, **named)

    monkeypatch.setattr(Student, "prepare", watched)
    runtime = {"device": "cpu", "precision": "bf16"}
    folder = base(root, model, "bfloat16")
    train(make_recipe(tmp_path, folder, stage("logit_kl", "all", model, steps=1), runtime=runtime))
    assert found == {(True, torch.bfloat16), (False, torch.bfloat16)}


@pytest.mark.slow
def test_a_base_in_float32_may_train_in_bfloat16(root: Path, tmp_path: Path) -> None:
    folder = base(root, "llama")
    runtime = {"device": "cpu", "precision": "bf16"}
    recipe = write_recipe(tmp_path, folder, stage("logit_kl"), runtime=runtime, finish={"verify": True})
    train(load_recipe(recipe, ["model.dtype=bfloat16"]))
    old, new = tensors(folder), tensors(tmp_path / "run" / "final")
    assert {t.dtype for t in new.values()} == {torch.float32}
    assert {name for name in old if not torch.equal(old[name], new[name])} == {n for n in old if ".mixer." in n}


@pytest.mark.slow
def test_a_model_that_fails_its_checks_can_be_saved(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LinearizeError("verification failed: so", Exit.CHECK_FAILED)

    monkeypatch.setattr(export, "verify_final", fail)
    recipe = make_recipe(tmp_path, base(root, "llama"), stage("logit_kl"), finish={"verify": True})
    kept = tmp_path / "run" / "checkpoints" / "logit_kl-4-end"
    with pytest.raises(LinearizeError, match=rf"failed.*--resume.*{kept}.*finish.verify=false") as caught:
        train(recipe)
    assert caught.value.code == Exit.CHECK_FAILED
    assert not (tmp_path / "run" / "final").exists()
    train(make_recipe(tmp_path, base(root, "llama"), stage("logit_kl")), resume=str(kept))
    assert load(tmp_path / "run" / "final")


@pytest.mark.slow
def test_an_adapter_is_kept_beside_the_base_on_request(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = {"merge_lora": False, "verify": False}
    _, final, logits = saved("llama", ["mixer", "lora"], root, tmp_path, monkeypatch, finish=finish)
    assert not any("default" in name for name in load_file(final / "adapter" / "adapter_model.safetensors"))
    plain = load(final)
    lines = (final / "README.md").read_text().partition("from peft")[2].partition("```")[0]
    with torch.no_grad():
        assert relative_error(plain(input_ids=IDS, use_cache=False).logits, logits) > 1e-3
        exec("from peft" + lines, names := {"model": plain, "name": final})
        ours = names["model"].eval()(input_ids=IDS, use_cache=False).logits
        opened = load_any(str(final), None, device="cpu", dtype="float32", teacher=False, trust_remote_code=False).model
        assert torch.equal(opened(input_ids=IDS, use_cache=False).logits, ours)  # as eval and generate have it
        with plain.teacher(), opened.teacher():
            softmax = [model(input_ids=IDS, use_cache=False).logits for model in (plain, opened)]
    assert torch.equal(*softmax)
    assert relative_error(ours, logits) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["BertForMaskedLM", "XLMRobertaForMaskedLM"])
def test_tied_weights_are_stored_under_the_name_that_the_source_has(tmp_path: Path, name: str) -> None:
    """In XLM-R the head comes first, so its name is the parameter's."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 97}
    model = getattr(transformers, name)(getattr(transformers, name).config_class(hidden_size=16, **sizes))
    model.save_pretrained(tmp_path / "source")
    stored = load_file(tmp_path / "source" / "model.safetensors")
    values = export.stored_names(model, set(dict(model.named_parameters())), set(stored), tmp_path)
    assert values.keys() == stored.keys()
    assert all(value.equal(stored[name]) for name, value in values.items())


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(LinearizeError, match=r"tokenizer.*loaded") as caught:
        open_processor(tmp_path, "masked")
    assert caught.value.code == Exit.INCOMPATIBLE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    with pytest.raises(LinearizeError, match="--trust-remote-code"):
        load_tokenizer(tmp_path, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("HubertModel", "HubertModel takes input_values"),
        ("BartForConditionalGeneration", r"reads.*writes"),
        ("VideoMAEForVideoClassification", r"finetune.*images"),
        ("Siglip2VisionModel", r"pixel_values.*pixel_attention_mask.*spatial_shapes"),
        ("CLIPModel", r"input_ids.*pixel_values"),
        ("CamembertForSequenceClassification", r"predicts.*tokens.*tokens"),
    ],
)
def test_models_without_data_of_their_kind_are_refused(tmp_path: Path, name: str, message: str) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "hidden_size": 16}
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1} if name.startswith("Bart") else sizes
    small = {"text_config": sizes, "vision_config": sizes} if name.startswith("CLIP") else small
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, name).config_class(**small))
    with pytest.raises(LinearizeError, match=message) as caught:
        check_source(FileSource(files=("a.txt",)), model, tmp_path, "data.train")
    assert caught.value.code == Exit.INCOMPATIBLE


def test_rounding_to_a_dtype_is_what_saving_in_it_does(tmp_path: Path) -> None:
    """Of a rotary embedding `to` would round the frequencies, which no checkpoint holds."""
    model = small_model("llama")
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)
    export.round_weights(model, torch.bfloat16)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).float()
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(one, kind)()) for one in (model, saved))
        assert ours.keys() == theirs.keys() != set()
        for name, value in ours.items():
            assert value.equal(theirs[name]), name


def test_a_tensor_of_another_dtype_keeps_its_bytes(root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base(root, "llama", "bfloat16"), tmp_path / "mixed")
    shard = folder / "model-source-00001-of-00001.safetensors"
    content = tensors(folder)
    content = {name: t for name, t in content.items() if ".mixer." not in name}
    content["model.norm.weight"] = content["model.norm.weight"].float() + 1e-5
    shard.unlink()
    save_file(content, shard, {"format": "pt"})
    train(make_recipe(tmp_path, folder, stage("logit_kl", "mixer")))
    final = tensors(tmp_path / "run" / "final")
    assert torch.equal(final["model.norm.weight"], content["model.norm.weight"])
    assert final["model.norm.weight"].dtype == torch.float32
    trained = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(final[trained], content[trained])


@pytest.mark.slow
def test_saving_is_verified_by_logits(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(tmp_path, base(root, "llama"), stage("logit_kl", ["new", "lora"]), finish={"verify": True})
    messages: list[str] = []
    honest = export.write_trained
    monkeypatch.setattr(export, "write_trained", lambda student, old, new, changed: honest(student, old, new, set()))
    with pytest.raises(LinearizeError, match="reloading changed logits") as caught:
        train(recipe)
    assert caught.value.code == Exit.CHECK_FAILED
    assert not (tmp_path / "run" / "final").exists()
    monkeypatch.undo()
    finetune(recipe, say=messages.append)
    assert any("logits equal the trained model's" in line for line in messages)
    assert not same(tensors(tmp_path / "run" / "final"), tensors(base(root, "llama")))


def test_norms_and_windows_are_calibrated_once_and_kept_by_checkpoints(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a stage trains something else, and whatever the batch size."""
    folder = base(root, "llama", norm="head", window=4)
    norms = [name for name in tensors(folder) if name.endswith(("norm_weight", "far_logit"))]
    assert {name.rpartition(".")[2] for name in norms} == {"norm_weight", "far_logit"}
    found = []
    for per_device, steps in ((1, 4), (2, 2)):
        place = tmp_path / str(per_device)
        one = stage("attention_transfer", "lora", batch={"per_device": per_device}, steps=steps)
        recipe = make_recipe(place, folder, one, checkpoint={"every_steps": 1})
        with monkeypatch.context() as patch:
            patch.setattr(Finetuner, "fidelity", lambda tuner: pytest.fail("killed"))
            with pytest.raises(pytest.fail.Exception):
                train(recipe)
        train(recipe)
        found.append({name: tensors(place / "run" / "final")[name] for name in norms})
    assert same(*found)
    assert all((weight != tensors(folder)[name]).all() for name, weight in found[0].items())


def test_a_merge_must_be_exact(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that is thrown away instead of merged: less than rounding to bfloat16 may change."""
    recipe = make_recipe(
        tmp_path, base(root, "llama", "bfloat16"), stage("logit_kl", ["new", "lora"]), finish={"verify": True}
    )
    honest = export.finish_adapters

    def lossy(student: Any, folder: Any) -> Any:
        student.lora.merge_and_unload, unload = student.lora.unload, student.lora.merge_and_unload
        try:
            return honest(student, folder)
        finally:
            student.lora.merge_and_unload = unload

    monkeypatch.setattr(export, "finish_adapters", lossy)
    with pytest.raises(LinearizeError, match=r"adapters.*changed") as caught:
        train(recipe)
    assert caught.value.code == Exit.CHECK_FAILED


@pytest.mark.slow
def test_rounding_is_told_and_refuses_nothing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    recipe = make_recipe(tmp_path, base(root, "llama", "bfloat16"), stage("logit_kl", ["new"]), finish={"verify": True})
    monkeypatch.setattr(export, "drift", lambda *given: (0.02, "a mean KL in nats of", 1e-2))
    finetune(recipe, say=messages.append)
    assert any(
        "rounding to bfloat16 changed them by a mean KL in nats of 2.0e-02 (warning: more than 1e-02" in s
        for s in messages
    )


def test_drift_is_of_predictions_not_of_the_largest_logit() -> None:
    logits = torch.randn(64, 97, generator=torch.Generator().manual_seed(3))
    moved = logits.clone()
    moved[5, 7] += 0.3 * logits.abs().max() * (logits[5, 7] < 0) + 0.2 * logits.abs().max()
    change, name, limit = export.drift(moved.flatten(), logits.flatten(), 97)
    assert "KL" in name
    assert change < limit
    assert float((moved - logits).abs().max() / logits.abs().max()) > 5e-2
    shifted, _, limit = export.drift(logits.roll(1, 0).flatten(), logits.flatten(), 97)
    assert shifted > limit
    assert export.drift(2 * logits.flatten(), logits.flatten(), 0)[0] == pytest.approx(1.0)
