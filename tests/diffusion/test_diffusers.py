"""Pipelines of diffusers: converted, loaded by diffusers alone, and the same as before where softmax comes back."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE, Command, holds, relative_error
from hub_server import Repo, serve
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("diffusers")

import diffusers
import peft
from diffusion import pipeline, sample, saved_pipelines, transformer

from linearize.checkpoint.shards import tensor_sha256
from linearize.checkpoint.source import read_header
from linearize.commands.verify import FOUND
from linearize.diffusion import code
from linearize.diffusion.convert import convert, plan_conversion
from linearize.diffusion.verify import check_hashes, check_keys, source_outputs, verify_folder
from linearize.errors import Exit, LinearizeError
from linearize.verify.checks import NONE_UNTOUCHED
from linearize.verify.child import latents
from linearize.verify.child.latents import INPUTS, denoised, make_latents
from linearize.verify.reload import clean_command, result_of, started
from linearize_kernels.hf.diffusion import Processor
from linearize_kernels.layout import Grid, TokenLayout

EXACT = TOLERANCE[torch.float32]
DIT, SANA, WAN = INPUTS
MECHANISMS = ("la", "mhla", "saga")
SHARD = "diffusion_pytorch_model-00001-of-00002.safetensors"
MIXERS = "diffusion_pytorch_model-00002-of-00002.safetensors"
# Three axes, none cut like another.
BLOCKS = {"frames": "2", "rows": "3", "columns": "2"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved pipeline around each class."""
    return saved_pipelines(tmp_path_factory.mktemp("sources"), INPUTS)


def converted(source: Path, output: Path, mechanism: str = "mhla", level: Any = "none", **arguments: Any) -> Any:
    """The plan and the parts of a conversion that was carried out."""
    plan, whole, parts = plan_conversion(str(source), mechanism, **arguments)
    convert(plan, whole, parts, output, level=level, say=lambda text: None)
    return plan, parts


def load(folder: Path) -> Any:
    """A transformer's own folder, as anyone would load it."""
    return diffusers.AutoModel.from_pretrained(str(folder), trust_remote_code=True)


def processors(model: Any) -> list[Any]:
    """Ours; by name, for a loaded model has classes of its own."""
    return [module for module in model.modules() if type(module).__name__ == Processor.__name__]


def hashes(folder: Path) -> dict[str, str]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())}


# ---------------------------------------------------------------- what is saved


ALONE = """
import diffusers, importlib.util
from diffusion import sample
assert importlib.util.find_spec("linearize") is None
diffusers.utils.logging.disable_progress_bar()
found = {}
for name, where in json.loads(sys.argv[1]).items():
    pipeline = diffusers.DiffusionPipeline.from_pretrained(where, trust_remote_code=True)
    found[name] = [sample(pipeline)]
    with pipeline.transformer.teacher():
        found[name].append(sample(pipeline))
torch.save(found, sys.argv[2])
"""


@pytest.mark.slow
def test_pipelines_load_without_linearize_and_make_the_same(sources: dict[str, Path], tmp_path: Path) -> None:
    """In one clean process; the last one comes from a Hub, of which diffusers downloads what it knows."""
    wanted, places = {}, {}
    for kind, mechanism in zip(INPUTS, MECHANISMS, strict=True):
        plan, (part,) = converted(sources[kind], tmp_path / kind, mechanism)
        made = diffusers.DiffusionPipeline.from_pretrained(sources[kind])
        wanted[kind] = [sample(made)]
        with torch.no_grad():
            linear, teacher = source_outputs(tmp_path / kind, part, plan)
        assert relative_error(linear, teacher) > 0.1
        places[kind] = str(tmp_path / kind)
    with serve() as hub:
        repo = hub.repos["user/video"] = Repo()
        repo.commit(
            {
                p.relative_to(tmp_path / WAN).as_posix(): p.read_bytes()
                for p in (tmp_path / WAN).rglob("*")
                if p.is_file()
            }
        )
        places["hub"] = "user/video"
        with clean_command(ALONE, [json.dumps(places), str(tmp_path / "found")]) as (command, environment):
            environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
            environment |= {"HF_HUB_DISABLE_XET": "1", "no_proxy": "127.0.0.1"}
            with started(command, environment) as child:
                result_of(child)
    found = torch.load(tmp_path / "found")
    for kind in INPUTS:
        assert torch.equal(found[kind][1], wanted[kind][0])
        assert relative_error(found[kind][0], found[kind][1]) > 0.01
    assert torch.equal(found["hub"][0], found[WAN][0])


@pytest.mark.slow
def test_convert_and_verify_by_command(sources: dict[str, Path], tmp_path: Path, linearize: Command) -> None:
    before = hashes(sources[WAN])
    options = [word for name, value in BLOCKS.items() for word in ("--set", f"{name}={value}")]
    output = tmp_path / "linear"
    asked = ["convert", sources[WAN], "--to", "mhla", *options, "-o", output, "--json"]
    code, out, err = linearize(*asked, "--dry-run")
    assert code == 0
    assert not output.exists()
    assert "WanTransformer3DModel" in err
    assert "transformer/blocks.*.attn1" in err
    assert "attn2" in err
    dry = json.loads(out)["plan"]
    code, out, err = linearize(*asked, "--verify", "full")
    assert code == 0, err
    assert holds(err, "source's")
    assert json.loads(out)["plan"] == dry
    assert [step["options"]["frames"] for step in dry["steps"]] == [2, 2]
    # The source is as it was, and so is all of it in the result.
    assert hashes(sources[WAN]) == before
    after = hashes(output)
    name = "transformer/diffusion_pytorch_model.safetensors"
    assert after[f"transformer/{SHARD}"] == before[name]
    rewritten = {name, "transformer/config.json", "model_index.json"}
    assert {key: after.get(key) for key in before.keys() - rewritten} == {
        key: before[key] for key in before.keys() - rewritten
    }
    assert json.loads((output / "linearize.json").read_text())["files"] == sorted(after)
    code, out, err = linearize("verify", output, "--strict", "--json")
    report = json.loads(out)
    assert (code, report["passed"]) == (0, True), err
    rows = {row["name"]: row for row in report["checks"]}
    assert rows["transformer: softmax teacher"]["difference"] == 0.0
    assert {row["status"] for row in rows.values()} == {"passed"}
    assert {"trust", "untouched weights"} < rows.keys()


def test_the_teacher_has_no_adapters(sources: dict[str, Path], tmp_path: Path) -> None:
    converted(sources[WAN], tmp_path / "linear", "mhla")
    model = load(tmp_path / "linear/transformer")
    inputs = make_latents(model)
    with model.teacher():
        wanted = denoised(model, inputs)
    model.add_adapter(peft.LoraConfig(target_modules=["to_q"], init_lora_weights=False))
    adapted = denoised(model, inputs)
    with model.teacher():
        assert torch.equal(denoised(model, inputs), wanted)
    assert torch.equal(denoised(model, inputs), adapted)


def test_teacher_belongs_to_one_thread(sources: dict[str, Path], tmp_path: Path) -> None:
    converted(sources[DIT], tmp_path / "linear", "la")
    model = load(tmp_path / "linear/transformer")
    inputs = make_latents(model)
    with ThreadPoolExecutor(1) as pool, model.teacher():
        teacher = denoised(model, inputs)
        with model.teacher():
            pass
        assert torch.equal(denoised(model, inputs), teacher)  # the outer one goes on
        with pytest.raises(RuntimeError, match=r"thread.*inside"):
            pool.submit(denoised, model, inputs).result()
        with pytest.raises(RuntimeError, match=r"thread.*inside"):
            pool.submit(model.teacher().__enter__).result()
    assert relative_error(denoised(model, inputs), teacher) > 1e-2


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("kind", INPUTS)
def test_every_mechanism_fits_each_class(sources: dict[str, Path], tmp_path: Path, kind: str, mechanism: str) -> None:
    plan, (part,) = converted(sources[kind], tmp_path / "linear", mechanism)
    model = load(tmp_path / "linear/transformer")
    linear, teacher = source_outputs(tmp_path / "linear", part, plan)
    inputs = make_latents(model)
    assert torch.equal(denoised(model, inputs), linear)
    with model.teacher():
        assert torch.equal(denoised(model, inputs), teacher)
    assert relative_error(linear, teacher) > 1e-2
    # Only what reads the latents themselves.
    assert [name for name, m in model.named_modules() if m in processors(model)] == [
        f"{step.site.path.removeprefix('transformer/')}.processor" for step in plan.steps
    ]
    assert all(step.site.path.endswith("attn1") for step in plan.steps)
    assert [note.partition(":")[0] for note in plan.notes] == (["relu_features"] if kind == SANA else [])


@pytest.mark.parametrize("copy", [False, True])
def test_weights_of_a_pipeline_are_copied_when_asked(sources: dict[str, Path], tmp_path: Path, copy: bool) -> None:
    """Those of the transformer and of the parts beside it."""
    source = sources["DiTTransformer2DModel"]
    converted(source, tmp_path / "linear", copy=copy)
    inodes = {path.stat().st_ino for path in source.rglob("*.safetensors")}
    assert len(inodes) > 1
    assert bool(inodes & {path.stat().st_ino for path in (tmp_path / "linear").rglob("*")}) == (not copy)


def test_a_pipeline_may_be_saved_again(sources: dict[str, Path], tmp_path: Path) -> None:
    converted(sources[DIT], tmp_path / "linear", "la")
    made = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "linear", trust_remote_code=True)
    with torch.no_grad():
        for processor in processors(made.transformer):
            processor.mixer.slope_logit.add_(1.0)
    made.save_pretrained(tmp_path / "again")
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert torch.equal(sample(again), sample(made))
    with pytest.raises(ValueError, match="trust_remote_code"):
        diffusers.DiffusionPipeline.from_pretrained(tmp_path / "again")
    # As after training, in one file without an index; the transformer alone, too.
    made.transformer.save_pretrained(tmp_path / "alone")
    for folder, label in ((tmp_path / "again", "transformer: index"), (tmp_path / "alone", "index")):
        rows = {check.name: check for check in verify_files(folder)}
        assert (rows[label].status, rows[label].detail.endswith(" tensors")) == ("passed", True), rows
        assert {check.status for check in rows.values()} == {"passed", "warning"}


def test_what_diffusers_does_not_read_stays_behind(
    sources: dict[str, Path], tmp_path: Path, linearize: Command
) -> None:
    source = Path(shutil.copytree(sources[DIT], tmp_path / "source"))
    (source / "old").mkdir()
    left = ["aws.json", "notes.txt", "vae/keys.json", "old/config.json", "pruned.safetensors"]
    for name in (*left, "LICENSE"):
        (source / name).write_text("secret")
    code, _, err = linearize("convert", source, "--to", "la", "--verify", "none", "-o", tmp_path / "linear")
    assert (code, holds(err, "it", f"{', '.join(sorted(left))}")) == (0, True), err
    found = hashes(tmp_path / "linear")
    assert "LICENSE" in found
    assert not found.keys() & set(left)
    (source / "vae" / "vocab.txt").symlink_to(tmp_path / "linear" / "README.md")
    code, _, err = linearize("convert", source, "--to", "la", "-o", tmp_path / "other")
    assert (code, holds(err, "source's")) == (3, True), err


def test_each_saved_model_runs_its_own_code(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(sources[WAN], tmp_path / "one", "la")
    flat = code.flat_files

    def edited(roots: list[str]) -> dict[str, str]:
        files = flat(roots)
        old = "return o.to(v.dtype), g, state"
        assert files["la.py"].count(old) == 1
        return files | {"la.py": files["la.py"].replace(old, "return 0.5 * o.to(v.dtype), g, state")}

    monkeypatch.setattr(code, "flat_files", edited)
    converted(sources[WAN], tmp_path / "two", "la")
    models = {name: load(tmp_path / name / "transformer") for name in ("one", "two", "one")}
    # Triton reads the text of its kernels.
    for name, files in (("one", flat(["la"])), ("two", edited(["la"]))):
        module = sys.modules[type(processors(models[name])[0].mixer).__module__]
        assert inspect.getsource(module) == files["la.py"]
        assert inspect.getsource(module.la_with_mass) in files["la.py"]
    inputs = make_latents(models["one"])
    first = {name: denoised(model, inputs) for name, model in models.items()}
    assert relative_error(first["two"], first["one"]) > 1e-2
    for processor in processors(models["two"]):
        processor.mixer.register_forward_hook(lambda module, args, out: (2.0 * out[0], out[1]))
    assert relative_error(denoised(models["two"], inputs), first["one"]) < EXACT
    assert torch.equal(denoised(models["one"], inputs), first["one"])


def test_the_checks_of_a_clean_process_see_what_is_wrong(sources: dict[str, Path], tmp_path: Path) -> None:
    converted(sources[WAN], tmp_path / "linear", "la")
    folder = tmp_path / "linear/transformer"
    shapes = latents.shapes_of(folder, "")
    assert check_keys(folder, shapes) == len(shapes)
    for wrong in ({**shapes, "x": [1]}, {**shapes, "proj_out.bias": [1]}, dict(list(shapes.items())[:-20])):
        with pytest.raises(LinearizeError, match="verification failed"):
            check_keys(folder, wrong)
    (model,) = latents.load_parts(folder).values()
    assert latents.CHECKS.keys() <= FOUND.keys()
    rows = {name: latents.row(check, model, 1e-5) for name, check in latents.CHECKS.items()}
    assert {row["status"] for row in rows.values()} == {"passed"}
    model.teacher = contextlib.nullcontext
    assert latents.row(latents.CHECKS["softmax teacher"], model, 1e-5)["status"] == "failed"
    processors(model)[0].mixer.register_forward_hook(lambda module, args, out: (out[0] + out[0].mean(0), out[1]))
    for name in ("rows alone", "another size"):
        assert latents.row(latents.CHECKS[name], model, 1e-5)["status"] == "failed"
    assert latents.loads_without_trust(folder)["status"] == "passed"
    assert latents.loads_without_trust(sources[WAN] / "transformer")["status"] == "failed"


@pytest.mark.slow
def test_a_result_that_differs_is_not_kept(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*arguments: Any) -> tuple[Tensor, Tensor]:
        linear, teacher = source_outputs(*arguments)
        return linear, 1.001 * teacher

    monkeypatch.setattr("linearize.diffusion.verify.source_outputs", other)
    with pytest.raises(LinearizeError, match=r"source's.*1") as raised:
        converted(sources[DIT] / "transformer", tmp_path / "linear", "la", level="full")
    assert raised.value.code == Exit.CHECK_FAILED
    assert not [*tmp_path.iterdir()]


# ---------------------------------------------------------------- what it computes


class Softmax(nn.Module):
    """In a mixer's place: what it is given, and the attention of the source."""

    geometric, patches = False, {}

    def __init__(self, relu: bool = False, drop_rope: bool = False) -> None:
        super().__init__()
        self.relu, self.drop_rope = relu, drop_rope
        self.seen: list[tuple[Tensor, ...]] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout) -> tuple[Tensor, None]:
        self.seen.append((q, k, v, x))
        if self.relu:
            weights = torch.einsum("bthd,bshd->bhts", q.relu(), k.relu())
            return torch.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdim=True), v), None
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2), None


def with_softmax(model: Any, **arguments: Any) -> list[Softmax]:
    """Processors of ours with softmax as their mixer."""
    mixers = []
    for path, module in model.named_modules():
        if path.endswith("attn1"):
            native, mixer = module.processor, Softmax(**arguments)
            module.set_processor(
                Processor(native, mixer, code.readers({type(native).__name__}).get(type(native).__name__))
            )
            mixers.append(mixer)
    return mixers


@pytest.mark.parametrize("kind", INPUTS)
def test_softmax_in_a_mixers_place_gives_the_source_back(kind: str) -> None:
    model = transformer(kind)
    inputs = make_latents(model)
    wanted = denoised(model, inputs)
    mixers = with_softmax(model, relu=kind == SANA)
    found = denoised(model, inputs)
    assert relative_error(found, wanted) < EXACT
    assert all(len(mixer.seen) == 1 for mixer in mixers)


def test_rotation_is_wans_own_and_may_be_taken_away() -> None:
    model = transformer(WAN)
    inputs = make_latents(model)
    kept = with_softmax(model)
    denoised(model, inputs)
    model = transformer(WAN)
    dropped = with_softmax(model, drop_rope=True)
    denoised(model, inputs)
    (q, k, v, x), (q0, k0, v0, x0) = kept[0].seen[0], dropped[0].seen[0]
    assert torch.equal(v, v0)
    assert torch.equal(x, x0)
    # The first token is not turned, and no token changes its length.
    assert torch.equal(q[:, 0], q0[:, 0])
    assert relative_error(q.norm(dim=-1), q0.norm(dim=-1)) < EXACT
    assert relative_error(q[:, 1:], q0[:, 1:]) > 0.1
    assert relative_error(k[:, 1:], k0[:, 1:]) > 0.1


@pytest.mark.parametrize("kind", INPUTS)
def test_the_grid_is_that_of_the_latents(sources: dict[str, Path], tmp_path: Path, kind: str) -> None:
    converted(sources[kind], tmp_path / "linear", "mhla")
    model = load(tmp_path / "linear/transformer")
    grids: list[Any] = []
    for processor in processors(model):
        processor.mixer.register_forward_pre_hook(lambda module, args: grids.append(args[4].grid))
    for larger in (1, 2, 1):
        grids.clear()
        denoised(model, make_latents(model, larger))
        rows, columns = 7 * larger, 7 * larger if kind == DIT else 5
        assert {tuple(grid.size) for grid in grids} == {(3, rows, columns) if kind == WAN else (rows, columns)}
        assert {(grid.prefix, grid.suffix) for grid in grids} == {(0, 0)}
        assert len(grids) == 2


def test_blocks_of_a_film_have_three_axes(sources: dict[str, Path], tmp_path: Path) -> None:
    """A key in another block of frames counts as much as the weight of the two blocks says."""
    converted(sources[WAN], tmp_path / "linear", "mhla", options=BLOCKS)
    (mixer, *_) = (processor.mixer for processor in processors(load(tmp_path / "linear/transformer")))
    assert mixer.layout == (2, 3, 2)
    assert mixer.block_logits.shape[-1] == 13
    torch.manual_seed(1)
    grid = (4, 6, 4)
    q, k, v = (torch.randn(1, 96, 2, 12) for _ in range(3))
    layout = TokenLayout(causal=False, grid=Grid(grid))
    with torch.no_grad():
        mixer.block_logits.fill_(-30.0)
        mixer.block_logits[..., range(13), range(13)] = 0.0  # each block reads itself
        found = mixer(q, k, v, torch.zeros(1, 96, 24), layout)[0]
        other = v.clone().view(1, *grid, 2, 12)
        other[:, 2:] += 1.0  # the second half of the film
        changed = mixer(q, k, other.view_as(v), torch.zeros(1, 96, 24), layout)[0]
    difference = (changed - found).view(1, *grid, 2, 12).abs().amax((0, 2, 3, 4, 5))
    assert bool((difference[:2] < 1e-5).all())
    assert bool((difference[2:] > 0.9).all())


def test_mixers_train_and_copies_have_their_own(sources: dict[str, Path], tmp_path: Path) -> None:
    converted(sources[WAN], tmp_path / "linear", "mhla")
    model = load(tmp_path / "linear/transformer")
    inputs = make_latents(model)
    new = [parameter for name, parameter in model.named_parameters() if ".mixer." in name]
    gradients = []
    for checkpointed in (False, True):
        model.train()
        model.enable_gradient_checkpointing() if checkpointed else model.disable_gradient_checkpointing()
        model.zero_grad()
        model(**inputs).sample.square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in new])
    assert all(bool(gradient.abs().sum() > 0) for gradient in gradients[0])
    assert all(relative_error(a, b) < EXACT for a, b in zip(*gradients, strict=True))
    others = [copy.deepcopy(model.eval()), pickle.loads(pickle.dumps(load(tmp_path / "linear/transformer")))]
    wanted = denoised(model, inputs)
    with torch.no_grad():
        for processor in processors(model):
            processor.mixer.block_logits.normal_()
    assert all(torch.equal(denoised(other, inputs), wanted) for other in others)
    assert not torch.equal(denoised(model, inputs), wanted)


def test_the_loop_of_the_docs_brings_a_model_closer_to_its_teacher(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = (Path(__file__).parents[2] / "docs/diffusers.md").read_text("utf-8")
    (loop,) = (block for block in docs.split("```") if block.startswith("python") and "optimizer" in block)
    converted(sources[WAN], tmp_path / "linear", "mhla")
    made = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "linear", trust_remote_code=True)
    inputs = make_latents(made.transformer)
    with made.transformer.teacher():
        wanted = denoised(made.transformer, inputs)
    before = (denoised(made.transformer, inputs) - wanted).square().mean()
    weights = {name: value.clone() for name, value in made.transformer.state_dict().items()}
    monkeypatch.chdir(tmp_path)
    exec(loop.removeprefix("python"), {"pipeline": made, "batches": [inputs] * 30})
    trained = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "wan-mhla-trained", trust_remote_code=True)
    assert (denoised(trained.transformer, inputs) - wanted).square().mean() < 0.9 * before
    for name, value in trained.transformer.state_dict().items():
        assert torch.equal(value, weights[name]) is (".mixer." not in name), name


def test_blocks_compile_to_one_graph(sources: dict[str, Path], tmp_path: Path) -> None:
    converted(sources[WAN], tmp_path / "linear", "mhla", layers="0")
    model = load(tmp_path / "linear/transformer")
    inputs = make_latents(model)
    wanted = denoised(model, inputs)
    with model.teacher():
        teacher = denoised(model, inputs)
    assert relative_error(wanted, teacher) > 1e-3
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    for _ in range(2):  # teacher() has a graph of its own
        with model.teacher():
            assert relative_error(denoised(model, inputs), teacher) < EXACT
        assert relative_error(denoised(model, inputs), wanted) < EXACT


def test_what_a_linear_layer_cannot_do_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    converted(sources[WAN], tmp_path / "linear", "la")
    model = load(tmp_path / "linear/transformer")
    with pytest.raises(NotImplementedError, match="in parallel"):
        model.enable_parallelism(config=None)
    with pytest.raises(NotImplementedError, match=r"take.*mixers"):
        model.set_attn_processor(model.blocks[0].attn2.processor)
    for made in (model, diffusers.DiffusionPipeline.from_pretrained(tmp_path / "linear", trust_remote_code=True)):
        with pytest.raises(NotImplementedError, match=r"take.*mixers"):
            made.enable_xformers_memory_efficient_attention()
    attention = model.blocks[0].attn1
    with pytest.raises(RuntimeError, match="with a mask"):
        attention(torch.zeros(1, 4, 24), None, torch.ones(4, 4), None)
    native = diffusers.models.attention_processor.SanaLinearAttnProcessor2_0()
    block = transformer(SANA).transformer_blocks[0].attn1
    with pytest.raises(RuntimeError, match="computed no softmax"):
        Processor(native, Softmax())(block, torch.zeros(1, 4, 24))
    processor = Processor(native, Softmax())
    with pytest.raises(RuntimeError, match="shapes"):  # before softmax, as where memory is out
        processor(block, torch.zeros(1, 4, 25))
    assert not processor.calls


def test_a_pipeline_is_not_converted_again_and_its_softmax_has_no_window(
    sources: dict[str, Path], tmp_path: Path, linearize: Command
) -> None:
    """Neither a source nor a converted one."""
    converted(sources[WAN], tmp_path / "linear", "la", layers="0")
    for folder in (sources[WAN], tmp_path / "linear"):
        code, _, err = linearize("convert", folder, "--restore", "0", "-o", tmp_path / "back")
        assert code == Exit.USAGE
        assert holds(err, "--restore", "diffusers", "--layers")
    asked = ("--to", "la", "--keep-softmax", "0", "--kept-window", "8", "-o", tmp_path / "back")
    code, _, err = linearize("convert", sources[WAN], *asked)
    assert code == Exit.INCOMPATIBLE
    assert holds(err, "--kept-window", "8", "transformer/blocks.0.attn1", "'window'")
    assert not (tmp_path / "back").exists()


# ---------------------------------------------------------------- other sources


def test_both_transformers_of_a_pipeline_are_converted(tmp_path: Path) -> None:
    pipeline(WAN, transformer_2=transformer(WAN, num_layers=1), boundary_ratio=0.5).save_pretrained(tmp_path / "source")
    plan, parts = converted(tmp_path / "source", tmp_path / "linear", "la")
    assert [step.site.layer for step in plan.steps] == [0, 1, 2]
    assert [part.name for part in parts] == ["transformer", "transformer_2"]
    made = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "linear", trust_remote_code=True)
    assert [len(processors(one)) for one in (made.transformer, made.transformer_2)] == [2, 1]
    plan, parts = converted(tmp_path / "source", tmp_path / "second", "la", layers="2")
    assert [site.layer for site in plan.kept] == [0, 1]
    made = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "second", trust_remote_code=True)
    assert [len(processors(one)) for one in (made.transformer, made.transformer_2)] == [0, 1]
    assert type(made.transformer) is diffusers.WanTransformer3DModel


def in_shards(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def pickled(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, safe_serialization=False)


def renamed(model: Any, folder: Path) -> None:
    """As checkpoints of before name the class of DiT."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "_class_name": "Transformer2DModel"}))


@pytest.mark.parametrize("save", [in_shards, pickled, renamed])
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_a_transformers_own_folder(tmp_path: Path, save: Callable[[Any, Path], None], dtype: str) -> None:
    save(transformer(DIT), tmp_path / "source")
    plan, (part,) = converted(tmp_path / "source", tmp_path / "linear", "saga", dtype=dtype)
    model = load(tmp_path / "linear")
    linear, _ = source_outputs(tmp_path / "linear", part, plan)
    assert relative_error(denoised(model, make_latents(model)), linear) < EXACT
    assert {check.status for check in verify_files(tmp_path / "linear")} == {"passed"}


def verify_files(folder: Path) -> list[Any]:
    """The checks of `linearize verify` that need no other process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linearize.diffusion.verify.check_behaviours", lambda *_: [])
        return verify_folder(folder)


# ---------------------------------------------------------------- mistakes


def config_of(folder: Path, **changes: Any) -> Path:
    """A folder that holds a config alone."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(changes))
    return folder


def changed(source: Path, target: Path, change: Callable[[Path], Any]) -> Path:
    shutil.copytree(source, target)
    change(target)
    return target


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(folder: Path) -> None:
    path = folder / "transformer/diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights.pop("proj_out_2.bias")
    save_file(weights, path)


MISTAKES: dict[str, tuple[Callable[[Path], Any], list[str], int, str]] = {
    "mechanism": (lambda f: None, ["--to", "gsa"], 3, "bidirectional; 'gsa' is not. Choose la or mhla or saga"),
    "option": (lambda f: None, ["--set", "blokcs=3"], 2, "Did you mean 'blocks'"),
    "images": (lambda f: None, ["--set", "frames=2"], 2, "images have no frames"),
    "layers": (lambda f: None, ["--layers", "2"], 2, "has 2 layers (0-1)"),
    "dtype": (lambda f: None, ["--dtype", "int8"], 2, "choose keep, float32"),
    "consent": (lambda f: None, ["--allow-drop", "alibi"], 2, "drops nothing of its softmax"),
    "revision": (lambda f: None, ["--revision", "main"], 2, "and a revision (main) is a branch"),
    "heads": (lambda f: None, ["--keep-heads", "0:0"], 3, "bidirectional"),
    "push": (lambda f: None, ["--push", "user/repo"], 2, "linearize push DIR user/repo"),
    "inside": (lambda f: None, ["-o", "{source}/linear"], 2, "separate folders"),
    "code": (lambda f: (f / "vae/own.py").write_text(""), [], 3, "its own code (vae/own.py)"),
    "quantized": (
        lambda f: edit(f / "transformer/config.json", quantization_config={"quant_method": "x"}), [], 3, "is quantized"
    ),
    "config": (lambda f: edit(f / "transformer/config.json", num_layers=3), [], 3, "missing transformer_blocks.2"),
    "width": (lambda f: edit(f / "transformer/config.json", attention_head_dim=8), [], 3, "the config asks for [16"),
    "weights": (cut, [], 3, "missing proj_out_2.bias"),
    "none": (lambda f: (f / "transformer/diffusion_pytorch_model.safetensors").unlink(), [], 3, "has no weights"),
    "class": (
        lambda f: edit(f / "transformer/config.json", _class_name="FluxTransformer2DModel"), [], 3,
        "holds FluxTransformer2DModel (transformer), AutoencoderKL (vae); of diffusers, linearize converts DiT",
    ),
    "link": (lambda f: (f / "x").symlink_to(f / "vae"), [], 3, "x is a link to"),
    "index": (lambda f: edit(f / "model_index.json", **{"../x": ["x", "Y"]}), [], 3, "'../x' leaves the folder"),
    "token": (lambda f: edit(f / "model_index.json", key="hf_" + "a" * 34), [], 3, "access token"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_nothing_is_written(
    sources: dict[str, Path], tmp_path: Path, linearize: Command, mistake: str
) -> None:
    change, arguments, wanted, words = MISTAKES[mistake]
    source = changed(sources[DIT], tmp_path / "source", change)
    arguments = [text.replace("{source}", str(source)) for text in arguments]
    before = hashes(source)
    given = ["convert", source, *([] if "--to" in arguments else ["--to", "mhla"]), *arguments]
    code, _, err = linearize(*given, *([] if "-o" in arguments else ["-o", tmp_path / "linear"]))
    assert (code, words in " ".join(err.split())) == (wanted, True), err
    assert hashes(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_other_commands_say_what_they_do_not_do(sources: dict[str, Path], tmp_path: Path, linearize: Command) -> None:
    for folder in (sources[DIT], sources[DIT] / "transformer"):
        code, _, err = linearize("inspect", folder)
        assert (code, holds(err, "model", "diffusers")) == (3, True), err
    code, _, err = linearize("verify", sources[DIT])
    assert (code, "nothing to verify" in " ".join(err.split())) == (3, True), err
    converted(sources[DIT], tmp_path / "linear", "la")
    code, _, err = linearize("push", sources[DIT], "user/repo", "--dry-run")
    assert (code, holds(err, "linearize", "finetune")) == (3, True), err
    code, _, err = linearize("eval", tmp_path / "linear")
    assert (code, holds(err, "recipe", "latents")) == (2, True), err
    code, _, err = linearize("convert", tmp_path / "linear", "--to", "la", "--trust-remote-code", "-o", tmp_path / "x")
    assert (code, "linear already" in " ".join(err.split())) == (3, True), err


def test_without_diffusers_it_says_what_to_install(
    sources: dict[str, Path], tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    code, _, err = linearize("convert", sources[DIT], "--to", "la", "-o", tmp_path / "linear")
    assert (code, 'pip install "linearize[diffusers]"' in " ".join(err.split())) == (Exit.RESOURCE, True), err


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.unlink()  # it is a link to the source's
    path.write_bytes(data)


def without_a_layer(folder: Path) -> Any:
    spec = json.loads((folder / "transformer/config.json").read_text())["linearize"]
    return {**spec, "layers": spec["layers"][1:]}


def test_damage_is_found(sources: dict[str, Path], tmp_path: Path) -> None:
    converted(sources[DIT], tmp_path / "linear", "la")
    harms: dict[str, Callable[[Path], Any]] = {
        "untouched weights": lambda f: flip(f / f"transformer/{SHARD}"),
        "transformer: new weights": lambda f: save_file(
            {name: value * torch.nan for name, value in load_file(f / f"transformer/{MIXERS}").items()},
            f / f"transformer/{MIXERS}",
        ),
        "files": lambda f: (f / "scheduler/scheduler_config.json").unlink(),
        "transformer: index": lambda f: edit(
            f / "transformer/diffusion_pytorch_model.safetensors.index.json", weight_map={}
        ),
    }
    for number, (name, harm) in enumerate(harms.items()):
        folder = changed(tmp_path / "linear", tmp_path / str(number), harm)
        assert [check.name for check in verify_files(folder) if check.status != "passed"] == [name]
    other = {"transformer: new weights": lambda f: flip(f / f"transformer/{MIXERS}")}
    other |= {"transformer: config": lambda f: edit(f / "transformer/config.json", linearize=without_a_layer(f))}
    for name, harm in other.items():
        folder = changed(tmp_path / "linear", tmp_path / name.rpartition(" ")[2], harm)
        assert [check.name for check in verify_files(folder) if check.status != "passed"] == [name]
    redirected = {
        "model_index.json": lambda f: edit(f / "model_index.json", transformer=["diffusers", DIT]),
        "transformer/config.json": lambda f: edit(f / "transformer/config.json", auto_map={"AutoModel": "x.Y"}),
        "vae/x.py": lambda f: (f / "vae/x.py").write_text(""),
    }
    for number, (name, harm) in enumerate(redirected.items()):
        folder = changed(tmp_path / "linear", tmp_path / f"code{number}", harm)
        with pytest.raises(LinearizeError, match=name.replace(".", r"\.") if number else "holds no transformer"):
            verify_files(folder)
    torn: dict[str, Callable[[Path], Any]] = {
        "is not valid JSON": lambda f: (f / "model_index.json").write_text('{"transformer": ['),
        "holds no transformer": lambda f: edit(f / "model_index.json", transformer=[]),
        "cannot read .*config": lambda f: (f / "transformer/config.json").unlink(),
    }
    for number, (message, harm) in enumerate(torn.items()):
        with pytest.raises(LinearizeError, match=message):
            verify_files(changed(tmp_path / "linear", tmp_path / f"torn{number}", harm))


def test_untouched_weights_are_those_of_all_parts(tmp_path: Path) -> None:
    """A folder without untouched files may have untouched tensors in a part."""
    (tmp_path / "transformer").mkdir()
    path = tmp_path / "transformer" / "model.safetensors"
    save_file({"a": torch.ones(2)}, path)
    for tensors, told in (
        ({}, NONE_UNTOUCHED[1]),
        ({"transformer/a": tensor_sha256(path, read_header(path)["a"])}, "0 shards, 1 tensor of other shards"),
    ):
        hashes = {"untouched": {"shards": {}, "tensors": tensors}, "written": {"shards": {}, "tensors": {}}}
        (tmp_path / "linearize.json").write_text(json.dumps(hashes))
        assert check_hashes(tmp_path, ["transformer"]) == ("passed", told)
