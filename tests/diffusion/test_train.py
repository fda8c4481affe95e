"""Diffusion transformers distilled on latents: small random pipelines of each class, and digits as images."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from conftest import Command, holds
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers")
pytest.importorskip("accelerate")

import diffusers
from diffusion import saved_pipelines, transformer

from linearize.diffusion.convert import convert, plan_conversion
from linearize.diffusion.evaluate import setback
from linearize.diffusion.finetune import make_accelerator
from linearize.diffusion.latents import Noise, noise_of
from linearize.diffusion.recipe import DiffusionRecipe, DiffusionRuntime
from linearize.diffusion.train import relative
from linearize.diffusion.verify import verify_folder
from linearize.errors import Exit, LinearizeError
from linearize.verify.child.latents import INPUTS

DIT, SANA, WAN = INPUTS
SHAPES = {DIT: (4, 8, 8), SANA: (4, 4, 8), WAN: (4, 3, 4, 8)}
STAGES = """
stages:
  - {kind: attention_transfer, optimizer: {lr: 3.0e-3}, batch: {per_device: 4}, steps: 30}
  - {kind: prediction, optimizer: {lr: 2.0e-3}, batch: {per_device: 2, gradient_accumulation_steps: 2}, steps: 30}
eval: {levels: [0.1, 0.9], samples: 2, sampling_steps: 3, max_latents: 4}
"""


def total(table: list[dict[str, float]]) -> float:
    """Errors of all noise levels."""
    return sum(row["error"] for row in table)


def make_latents(place: Path, kind: str, form: str = ".npy") -> None:
    """Six latents and their prompts, in one format."""
    generator = torch.Generator().manual_seed(0)
    for folder in ("latents", "prompts"):
        (place / folder).mkdir(parents=True)
    for n in range(6):
        latent = torch.randn(SHAPES[kind], generator=generator)
        prompt = torch.tensor(n) if kind == DIT else torch.randn(5, 16, generator=generator)
        for folder, tensor in (("latents", latent), ("prompts", prompt)):
            path = place / folder / f"{n}{form}"
            if form == ".npy":
                numpy.save(path, tensor.numpy())
            elif form == ".pt":
                torch.save({"latents": tensor, "other": torch.ones(1)}, path)
            else:
                save_file({"any": tensor}, path)


def recipe(place: Path, source: Path, mechanism: str = "", stages: str = STAGES, more: str = "") -> Path:
    """`source` is converted by the run to `mechanism`; without one it was converted before."""
    path = place / "recipe.yaml"
    convert = f"convert: {{mechanism: {mechanism}}}\n" if mechanism else ""
    path.write_text(
        f"version: 1\nname: small\noutput_dir: {place / 'run'}\nmodel: {{base: {source}}}\n"
        f"{convert}"
        f"data: {{train: {{latents: {place / 'latents'}, prompts: {place / 'prompts'}}}}}\n{stages}{more}"
    )
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_pipelines(tmp_path_factory.mktemp("sources"), INPUTS)


@pytest.fixture(scope="module")
def linear(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Those pipelines, converted."""
    place = tmp_path_factory.mktemp("linear")
    for kind, mechanism in ((DIT, "saga"), (SANA, "mhla"), (WAN, "la")):
        convert(*plan_conversion(str(sources[kind]), mechanism), place / kind, level="none", say=lambda text: None)
    return {kind: place / kind for kind in INPUTS}


@pytest.mark.parametrize(
    ("kind", "noise", "rates"),
    [
        (SANA, "flow", ()),
        # The gate of saga is linear in what enters it, and a DiT's scales and shifts make that large.
        (
            DIT,
            "epsilon",
            (
                *("stages.attention_transfer.optimizer.lr=3.0e-4", "stages.prediction.optimizer.lr=2.0e-4"),
                *(f"stages.{name}.schedule={{name: cosine}}" for name in ("attention_transfer", "prediction")),
            ),
        ),
    ],
    ids=["sana", "dit"],
)
def test_predictions_come_closer_to_the_teachers(
    linear: dict[str, Path], tmp_path: Path, linearize: Command, kind: str, noise: str, rates: tuple[str, ...]
) -> None:
    make_latents(tmp_path, kind, ".pt")
    more = "finish: {verify: false}\n"
    code, out, err = linearize("finetune", recipe(tmp_path, linear[kind], more=more), *rates, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["noise"] == noise
    assert total(report["predictions"]["trained"]) < 0.95 * total(report["predictions"]["converted"])


@pytest.mark.slow
def test_a_pipeline_is_converted_distilled_evaluated_and_pushed(
    sources: dict[str, Path], tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_latents(tmp_path, WAN, ".safetensors")
    path = recipe(tmp_path, sources[WAN], "mhla")
    assert linearize("recipes", "validate", path)[0] == 0
    assert linearize("finetune", path, "--dry-run")[0] == 0
    assert not (tmp_path / "run").exists()
    code, out, err = linearize("finetune", path, "--json")
    assert code == 0, err
    report, final = json.loads(out), tmp_path / "run" / "final"
    assert total(report["predictions"]["trained"]) < 0.95 * total(report["predictions"]["converted"])
    assert (final / "samples.png").read_bytes().startswith(b"\x89PNG")
    card = (final / "README.md").read_text()
    assert f"| 0.1 | {report['predictions']['converted'][0]['error']:.3f} |" in card
    assert "untrained" not in card
    # The run itself loaded it in a clean process; what is left are the checks of its files.
    assert {check.status for check in verify_folder(final, strict=True, behaviours=False)} == {"passed"}
    again, _, err = linearize("finetune", path)
    assert again == 0
    assert "is finished already" in err
    # Its folder is a run's, as of any model.
    rows = json.loads(linearize("runs", tmp_path, "--json")[1])
    assert [(row["unit"], row["tokens"], row["at"]) for row in rows] == [("latents", 30 * 4 + 30 * 4, "finished")]
    assert linearize("report", tmp_path / "run")[0] == 0
    assert "linearize eval" not in (tmp_path / "run" / "report.html").read_text()
    # What the run said of it, said of the saved folder.
    monkeypatch.setattr("linearize.terminal.progress.SHOWN_AFTER", 0.0)
    monkeypatch.setattr("linearize.terminal.progress.LINE_EVERY", 0.0)
    code, out, err = linearize("eval", final, "--recipe", path, "-o", tmp_path / "found.json", "--json")
    assert code == 0, err
    assert all(f"{what}: 100%, 0 s left" in err for what in ("predictions", "samples"))
    found = json.loads(out)["predictions"]["student"]
    assert [row["error"] for row in found] == pytest.approx(
        [row["error"] for row in report["predictions"]["trained"]], rel=1e-4
    )
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = linearize("push", final, "user/pipeline", "--dry-run")
    assert code == 0, err
    assert "transformer/config.json" in err
    assert holds(err, "Distilled", "6")


def test_what_changed_since_is_not_pushed(linear: dict[str, Path], tmp_path: Path, linearize: Command) -> None:
    shutil.copytree(linear[WAN], tmp_path / "linear")
    code, out, err = linearize("push", tmp_path / "linear", "user/film", "--dry-run", "--json")
    assert code == 0, err
    upload = json.loads(out)["upload"]
    assert 'name = "user/film"\npipeline = DiffusionPipeline.from_pretrained(name, ' in upload["card"]
    files = upload["files"]
    assert {"model_index.json", "README.md", "linearize.json", "vae/config.json"} <= files.keys()
    shard = max((tmp_path / "linear" / "transformer").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.unlink()
    shard.write_bytes(data)
    code, out, err = linearize("push", tmp_path / "linear", "user/film", "--dry-run")
    assert (code, out) == (Exit.CHECK_FAILED, "")
    assert holds(err, "recorded", "bytes")
    (tmp_path / "linear" / "transformer" / "config.json").write_text("{}")
    assert linearize("push", tmp_path / "linear", "user/film", "--dry-run")[0] == Exit.INCOMPATIBLE


def test_all_weights_train_and_the_rest_keeps_its_bytes(
    linear: dict[str, Path], tmp_path: Path, linearize: Command
) -> None:
    """Beside a copy of the teacher; what is no transformer stays as it was."""
    make_latents(tmp_path, SANA)
    stages = "stages: [{kind: prediction, train: all, optimizer: {lr: 1.0e-3, new_lr: 1.0e-2}, steps: 4}]\n"
    more = "finish: {verify: false}\n"
    code, out, err = linearize("finetune", recipe(tmp_path, linear[SANA], stages=stages, more=more), "--json")
    assert code == 0, err
    before, after = linear[SANA], tmp_path / "run" / "final"
    for part, same in (("transformer", False), ("vae", True)):
        ours, theirs = (
            {n: t for shard in (place / part).glob("*.safetensors") for n, t in load_file(shard).items()}
            for place in (after, before)
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours) == same
    assert [row["error"] for row in json.loads(out)["predictions"]["converted"]] != [
        row["error"] for row in json.loads(out)["predictions"]["trained"]
    ]


def test_a_run_goes_on_where_it_was_interrupted(
    linear: dict[str, Path], tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from linearize.diffusion import train

    stages = STAGES.replace("steps: 30", "steps: 4")
    more = "checkpoint: {every_steps: 2}\nfinish: {verify: false}\n"
    weights, calls, real = [], [], train.Distiller.match

    def stop(self: Any, inputs: Any, share: float) -> float:
        calls.append(share)
        if len(calls) == 6:
            raise KeyboardInterrupt
        if len(calls) == 10:  # in the last step
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, inputs, share)

    for name in ("whole", "parts"):
        place = tmp_path / name
        make_latents(place, WAN)
        path = recipe(place, linear[WAN], stages=stages, more=more)
        if name == "parts":
            with monkeypatch.context() as broken:
                broken.setattr(train.Distiller, "match", stop)
                assert linearize("finetune", path)[0] == Exit.INTERRUPTED
                (state,) = (place / "run" / "checkpoints").glob("prediction-*/optimizer.pt")
                kept = state.read_bytes()
                for broken in (b"", kept[:-100]):
                    state.write_bytes(broken)
                    code, _, err = linearize("finetune", path, "--stage", "prediction")
                    assert (code, "optimizer.pt is damaged" in " ".join(err.split())) == (Exit.USAGE, True), err
                    assert linearize("finetune", path)[0] == Exit.USAGE
                state.write_bytes(kept)
                code, _, err = linearize("finetune", path)
                assert (code, holds(err, "interrupted", "4")) == (130, True), err
                assert not (place / "run" / "final").exists()
        assert linearize("finetune", path)[0] == 0
        shard = max((place / "run" / "final" / "transformer").glob("*.safetensors"))
        weights.append(load_file(shard))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def flipped(path: Path, at: int) -> None:
    """Change one bit of a file, which may be a hard link."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()
    path.write_bytes(data)


QUICK = STAGES.replace("steps: 30", "steps: 2").replace(
    "gradient_accumulation_steps: 2", "gradient_accumulation_steps: 1"
)
MORE = "checkpoint: {every_steps: 1}\nfinish: {verify: false}\n"


def stopped(linearize: Command, monkeypatch: pytest.MonkeyPatch, *command: Any) -> int:
    """The exit code of a command whose second stage is interrupted."""
    from linearize.diffusion import train

    def stop(*_: Any) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(train.Distiller, "match", stop)
        return linearize(*command)[0]


def test_a_run_goes_on_with_what_it_began_with(
    linear: dict[str, Path], tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_latents(tmp_path, WAN)
    shutil.copytree(linear[WAN], tmp_path / "linear")
    path = recipe(tmp_path, tmp_path / "linear", stages=QUICK, more=MORE)
    assert stopped(linearize, monkeypatch, "finetune", path) == Exit.INTERRUPTED
    shard = max((tmp_path / "linear" / "transformer").glob("*.safetensors"))
    (state,) = (tmp_path / "run" / "checkpoints").glob("*/trained.safetensors")
    kept = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and file != tmp_path / "recipe"}
    for file, at, message in (
        (tmp_path / "latents" / "0.npy", -1, "changed since this run began: data.train.latents"),
        (tmp_path / "prompts" / "5.npy", -1, "changed since this run began: data.train.prompts"),
        (shard, -1, f"changed since this run began: {shard}"),
        (state, -1, f"{state} is damaged"),
    ):
        flipped(file, at)
        code, out, err = linearize("finetune", path)
        assert (code, out) == (Exit.USAGE, ""), err
        assert message.replace(" ", "") in "".join(err.split())
        file.write_bytes(kept[file])
    assert {file: file.read_bytes() for file in kept} == kept
    record = tmp_path / "run" / "run.json"
    record.write_text(record.read_text().replace(torch.__version__, "1.0"))
    code, _, err = linearize("finetune", path)
    assert code == 0, err
    assert holds(err, "torch", "1.0", f"{torch.__version__}")


@pytest.mark.slow
def test_starting_over_keeps_the_finished_model_until_the_new_one_is_ready(
    sources: dict[str, Path], tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_latents(tmp_path, WAN)
    path = recipe(tmp_path, sources[WAN], "la", stages=QUICK, more=MORE)
    assert linearize("finetune", path)[0] == 0
    run = tmp_path / "run"
    for place in ("final", "converted"):
        mine = run / place / "thesis.txt"
        mine.write_text("mine")
        code, _, err = linearize("finetune", path, "--resume", "never")
        assert code == Exit.USAGE, err
        assert holds(err, "linearize", "remove")
        assert mine.read_text() == "mine"
        mine.unlink()
    card = run / "final" / "README.md"
    at = card.stat().st_mtime_ns
    assert stopped(linearize, monkeypatch, "finetune", path, "--resume", "never") == Exit.INTERRUPTED
    assert card.stat().st_mtime_ns == at
    code, _, err = linearize("finetune", path)  # goes on, for what is finished is the model of before
    assert (code, "finished already" in err) == (0, False), err
    assert card.stat().st_mtime_ns > at
    assert "finished already" in linearize("finetune", path)[2]


def test_only_what_linearize_wrote_goes_along(linear: dict[str, Path], tmp_path: Path, linearize: Command) -> None:
    make_latents(tmp_path, WAN)
    shutil.copytree(linear[WAN], tmp_path / "linear")
    (tmp_path / "secret").write_text("root")
    (tmp_path / "linear" / "aws.json").write_text("{}")
    (tmp_path / "linear" / "words.txt").symlink_to(tmp_path / "secret")
    stages = "stages: [{kind: prediction, optimizer: {lr: 1.0e-3}, steps: 1}]\n"
    path = recipe(tmp_path, tmp_path / "linear", stages=stages, more=MORE)
    code, _, err = linearize("finetune", path)
    assert code == 0, err
    final = tmp_path / "run" / "final"
    written = {file.relative_to(final).as_posix() for file in final.rglob("*") if file.is_file()}
    theirs = {*json.loads((linear[WAN] / "linearize.json").read_text())["files"]}
    assert written == theirs | {"samples.png"}
    config = tmp_path / "linear" / "vae" / "config.json"
    config.rename(tmp_path / "elsewhere.json")
    config.symlink_to(tmp_path / "elsewhere.json")
    code, _, err = linearize("finetune", path, f"output_dir={tmp_path / 'other'}")
    assert (code, holds(err, "link", "to")) == (Exit.INCOMPATIBLE, True), err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents/0.npy": torch.randn(5, 3, 4, 8)}, ("one shape",)),
        ({"latents/0.npy": torch.randn(4, 4)}, ("latent", "4")),
        ({"latents/0.npy": torch.zeros(0, 4, 3, 4, 8)}, ("holds", "latent")),
        ({"prompts/3.npy": None}, ("prompts", "3")),
        ({"prompts/3.npy": torch.zeros(0, 5, 16)}, ("[tokens,channels]", "1")),
        ({"prompts/3.npy": torch.full((5, 16), torch.nan)}, ("embeddings", "finite")),
        ({"prompts/3.npy": torch.randn(5, 7)}, ("[tokens,16]",)),
        ({f"latents/{n}.npy": torch.randn(5, 3, 4, 8) for n in range(6)}, ("5", "channels", "4")),
        ({f"latents/{n}.npy": torch.randn(4, 3, 3, 8) for n in range(6)}, ("patches", "[1", "2", "2]")),
    ],
)
def test_wrong_data_are_told_before_anything_is_written(
    sources: dict[str, Path], tmp_path: Path, linearize: Command, change: dict[str, Any], message: str
) -> None:
    make_latents(tmp_path, WAN)
    for name, tensor in change.items():
        if tensor is None:
            (tmp_path / name).unlink()
        else:
            numpy.save(tmp_path / name, tensor.numpy())
    code, out, err = linearize("finetune", recipe(tmp_path, sources[WAN], "la"))
    assert (code, out) == (Exit.INCOMPATIBLE, "")
    assert holds(err, *message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.prediction.stps=3", ("'steps'",)),
        ("stages.attention_transfer.train=all", ("must", "new")),
        ("stages.prediction.optimizer.memory=small", ("memory", "full")),
        ("data.train.latents=nowhere", ("folder", "'")),
    ],
)
def test_a_wrong_recipe_is_told(
    sources: dict[str, Path], tmp_path: Path, linearize: Command, override: str, message: str
) -> None:
    make_latents(tmp_path, WAN)
    code, out, err = linearize("finetune", recipe(tmp_path, sources[WAN], "la"), override)
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, *message)
    assert not (tmp_path / "run").exists()


def test_what_a_run_cannot_do_is_told_before_anything_is_written(
    sources: dict[str, Path], tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(repo: str) -> None:
        raise LinearizeError(f"nothing can be pushed to {repo}", Exit.HUB)

    monkeypatch.setattr("linearize.diffusion.finetune.check_access", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    make_latents(tmp_path, WAN)
    path, inside = recipe(tmp_path, sources[WAN], "la"), sources[WAN] / "run"
    for asked, wanted, message in (
        (("--stage", "prediction"), Exit.USAGE, ("--stage", "attention_transfer")),
        ((f"output_dir={inside}",), Exit.USAGE, ("separate", "folders")),
        (("finish.push=user/film",), Exit.HUB, ("user/film",)),
        (("runtime.device=cuda",), Exit.RESOURCE, ("torch", "CUDA")),
        (("convert.keep_heads=0:0",), Exit.INCOMPATIBLE, ("0", "bidirectional")),
        (("convert.keep_softmax=0", "convert.kept_window=8"), Exit.INCOMPATIBLE, ("'window'",)),
    ):
        for more in ((), ("--dry-run",)):
            if wanted == Exit.HUB and more:  # a dry run asks the Hub nothing
                continue
            code, out, err = linearize("finetune", path, *asked, *more)
            assert (code, out) == (wanted, ""), err
            assert holds(err, *message)
            assert not (tmp_path / "run").exists()
            assert not inside.exists()
    code, out, err = linearize("finetune", path, "--stage", "attention_transfer", "--dry-run", "--json")
    assert [one["stage"] for one in json.loads(out)["stages"]] == ["attention_transfer"], err


def test_a_model_that_takes_more_than_prompts_is_refused_before_it_is_converted(
    tmp_path: Path, linearize: Command
) -> None:
    make_latents(tmp_path, SANA)
    transformer(SANA, guidance_embeds=True).save_pretrained(tmp_path / "guided")
    code, out, err = linearize("finetune", recipe(tmp_path, tmp_path / "guided", "la"))
    assert (code, out) == (Exit.INCOMPATIBLE, "")
    assert holds(err, "guidance_embeds")
    assert not (tmp_path / "run").exists()


def test_what_eval_does_not_do_with_a_pipeline_is_told(
    linear: dict[str, Path], tmp_path: Path, linearize: Command
) -> None:
    make_latents(tmp_path, WAN)
    given = linear[WAN], "--recipe", recipe(tmp_path, linear[WAN])
    for more, message in (
        (("--teacher", "x"), ("teacher", "inside")),
        (("-o", tmp_path / "a.png"), ("a.json",)),
        (("--trials", "9"), ("--trials", "diffusers", "recipe's")),
        (("--seed", "1", "--batch-tokens", "9", "--dtype", "float32"), ("--seed", "--batch-tokens", "--dtype")),
    ):
        code, out, err = linearize("eval", *given, *more)
        assert (code, out) == (Exit.USAGE, ""), err
        assert holds(err, *message)
    assert not (tmp_path / "a.png").exists()


def test_runs_and_eval_compute_in_the_precision_of_the_recipe() -> None:
    for asked, found in (("bf16", "bf16"), ("auto", "no")):
        made = DiffusionRecipe.model_construct(name="x", runtime=DiffusionRuntime(device="cpu", precision=asked))
        assert make_accelerator(made).mixed_precision == found


def test_a_latent_counts_the_same_in_every_batch() -> None:
    """However large its outputs are beside those of the others, at other noise levels."""
    torch.manual_seed(0)
    theirs = torch.randn(3, 4, 5) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    ours = theirs + torch.randn(3, 4, 5)
    alone = [relative(o[None], t[None]) for o, t in zip(ours, theirs, strict=True)]
    assert torch.isclose(relative(ours, theirs), torch.stack(alone).mean())


def test_training_that_led_away_from_the_teacher_is_told() -> None:
    better, worse = ([{"level": 0.1, "error": error}, {"level": 0.9, "error": 0.2}] for error in (0.2, 0.3))
    assert holds(str(setback(better, worse)), "0.250", "0.200")
    assert setback(worse, better) is None


def test_noise_is_that_of_the_scheduler() -> None:
    x, noise, level = torch.ones(2, 1, 2, 2), torch.full((2, 1, 2, 2), 3.0), torch.tensor([0.0, 1.0])
    flow = noise_of("auto", WAN, diffusers.FlowMatchEulerDiscreteScheduler())
    noised, time = flow.at(x, noise, level)
    assert torch.equal(noised[0], x[0])
    assert torch.equal(noised[1], noise[1])
    assert time.tolist() == [0.0, 1000.0]
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=100)
    epsilon = noise_of("auto", DIT, scheduler)
    noised, time = epsilon.at(x, noise, level)
    assert torch.allclose(noised, scheduler.add_noise(x, noise, time))
    assert time.tolist() == [0, 99]
    assert isinstance(noise_of("flow", DIT, scheduler), Noise)
    assert noise_of("flow", DIT, scheduler).kind == "flow"
    assert [noise_of("auto", kind, None).kind for kind in (DIT, SANA)] == ["epsilon", "flow"]


def test_digits_are_drawn_by_student_and_teacher(tmp_path: Path, linearize: Command) -> None:
    """A DiT that learned to draw digits, without a VAE, distilled on the same images: latents of one channel."""
    datasets = pytest.importorskip("sklearn.datasets")
    found = datasets.load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 8 - 1
    labels = torch.from_numpy(found.target).long()
    torch.manual_seed(0)
    teacher = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, num_layers=2, in_channels=1, out_channels=1, sample_size=8,
        num_embeds_ada_norm=10, patch_size=1,
    )  # fmt: skip
    noise, optimizer = noise_of("flow", DIT, None), torch.optim.AdamW(teacher.parameters(), lr=2e-3)
    for _ in range(40):
        rows, level = torch.randint(len(images), (32,)), torch.rand(32)
        drawn = torch.randn(32, 1, 8, 8)
        noised, time = noise.at(images[rows], drawn, level)
        loss = (teacher(noised, time, labels[rows]).sample - (drawn - images[rows])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    teacher.eval().save_pretrained(tmp_path / "teacher")
    planned = plan_conversion(str(tmp_path / "teacher"), "mhla")
    convert(*planned, tmp_path / "linear", level="none", say=lambda text: None)
    for folder, tensor in (("latents", images[:256]), ("prompts", labels[:256])):
        (tmp_path / folder).mkdir()
        numpy.save(tmp_path / folder / "digits.npy", tensor.numpy())
    stages = STAGES.replace("per_device: 4", "per_device: 16").replace("per_device: 2", "per_device: 8")
    stages = stages.replace("lr: 3.0e-3", "lr: 1.0e-2").replace("steps: 30", "steps: 12")
    more = "noise: flow\nfinish: {verify: false}\n"
    code, out, err = linearize("finetune", recipe(tmp_path, tmp_path / "linear", "", stages, more), "--json")
    assert code == 0, err
    before, after = json.loads(out)["predictions"].values()
    assert total(after) < 0.8 * total(before)
    assert (tmp_path / "run" / "samples.png").read_bytes().startswith(b"\x89PNG")


def test_images_are_encoded_by_the_pipelines_vae(sources: dict[str, Path], tmp_path: Path, linearize: Command) -> None:
    image = pytest.importorskip("PIL.Image")
    make_latents(tmp_path, DIT)
    for path in (tmp_path / "latents").iterdir():
        path.unlink()
        pixels = numpy.random.default_rng(0).integers(0, 255, (40, 32, 3), dtype=numpy.uint8)
        image.fromarray(pixels).save(path.with_suffix(".png"))
    path = recipe(tmp_path, sources[DIT], "la")
    code, out, err = linearize("finetune", path, "data.train.size=16", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["latents"] == 6
    transformer(DIT).save_pretrained(tmp_path / "alone")
    code, _, err = linearize("finetune", path, f"model.base={tmp_path / 'alone'}", "--dry-run")
    assert code == Exit.INCOMPATIBLE
    assert holds(err, "VAE")
