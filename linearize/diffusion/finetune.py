"""Finetune a diffusion transformer: the steps of ../finetune.py for a job of latents.

Read `train` first; train.py has the stages, latents.py the data, evaluate.py what is compared.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor

from ..checkpoint import carried
from ..checkpoint import write as checkpoint
from ..checkpoint.atomic import output_folder, write_result
from ..checkpoint.card import UNTRAINED
from ..checkpoint.manifest import listed_files
from ..checkpoint.provenance import check_code_cache
from ..checkpoint.shards import TORCH_DTYPES, combined_sha256, file_hashes, link_or_copy, read_tensor, write_shard
from ..checkpoint.source import Entry, read_header, read_json
from ..convert import check_disk
from ..errors import CheckFailedError, IncompatibleError, reason_of, resource_error
from ..hub.push import check_access, push_saved
from ..job import start
from ..job.checks import check_stage_order
from ..page.drawing import pillow
from ..plan.plan import Plan
from ..terminal.output import counted
from ..terminal.progress import progress
from ..train.device import resolve_precision, takes_cpu
from ..train.runs import Run
from ..train.runtime import PATIENCE
from ..verify.child.latents import load_parts, parts_of
from . import convert as surgery
from .evaluate import SAMPLES, compare_predictions, latents_compared, picture, setback
from .latents import Data, Decode, Noise, Opened, files_of, noise_of, read_data
from .push import plan_push
from .recipe import DiffusionRecipe
from .train import Distiller
from .verify import converted_parts, verify_folder

if TYPE_CHECKING:
    from ..job.resolve import Job

PICTURE = "samples.png"


def train(job: Job) -> dict[str, Any]:
    """Carry a job out: start or go on with its run, train, compare, save. Returns the report: `output`, and
    `predictions` before and after by noise level."""
    recipe, run, say = cast(DiffusionRecipe, job.recipe), start.run_of(job), job.say
    pillow(SAMPLES)
    accelerator = make_accelerator(recipe)
    main = accelerator.is_main_process
    if recipe.finish.push is not None and main:
        check_access(recipe.finish.push)
    with contextlib.closing(run):
        with run.preparing(main), accelerator.main_process_first():
            base, opened = open_base(job, main)
        tuner = Distiller(recipe, opened, accelerator)
        before, done = compare_predictions(tuner), tuner.restore(run)
        for number, stage in enumerate(recipe.stages):
            if number < done.stage + done.done:
                continue
            if job.only is not None and stage.name != job.only:  # a later one, for those before are done
                break
            say(f"{stage.name}: {stage.steps:,} steps of {tuner.latents_of(stage)} latents")
            tuner.run(number, run, done.step if number == done.stage else 0)
        complete = job.only is None or job.only == recipe.stages[-1].name
        report: dict[str, Any] = {"output": str(run.final) if complete else None, "noise": opened.noise.kind}
        report["latents"] = len(opened.data.latents)
        report["predictions"] = {"converted": before, "trained": compare_predictions(tuner)}
        if complete and main:
            if message := setback(*report["predictions"].values()):
                say(message)
            png = picture(tuner)
            write_result(run.folder / PICTURE, png)
            run.write_report(report)  # first, for a run with `final` counts as finished and has a report
            save(base, run.final, tuner.weights(), report, png, recipe.finish.verify)
            run.finish()
            say(f"saved {run.final}; samples of student and teacher are in {run.folder / PICTURE}")
            if recipe.finish.push is not None:
                given = run.final, recipe.finish.push, recipe.model.trust_remote_code, say
                report["pushed"] = push_saved(*given, plan_push)
        accelerator.wait_for_everyone()
    return report


def open_base(job: Job, owner: bool) -> tuple[Path, Opened]:
    """The folder that training starts from, converted where the recipe says so, and what is in it. The process that is
    `owner` opens the run's folder and writes. All that can be refused is refused before."""
    recipe, run = cast(DiffusionRecipe, job.recipe), start.run_of(job)
    planned, folder, _ = job.base
    opened = None if folder is None else opened_at(folder, recipe)
    if owner:
        if folder is None:
            plan, source, parts = planned
            check_disk(plan, source, run.converted)
            data_of(recipe, parts[0].model, source.folder)
        else:
            kept_files(folder)
        versions = start.versions() | {"diffusers": importlib.metadata.version("diffusers")}
        for note in run.start(versions, data=data_hashes(recipe), base=folder):
            job.say(note)
        if folder is None:
            surgery.convert(plan, source, parts, run.converted, level="keys", seed=recipe.seed, say=job.say)
            run.note_base(run.converted)
    folder = folder or run.converted
    return folder, opened or opened_at(folder, recipe)


def opened_at(base: Path, recipe: DiffusionRecipe) -> Opened:
    """What is in a converted folder, and the recipe's data for it."""
    model, noise = open_model(base, recipe)
    return Opened(model, noise, *data_of(recipe, model, base))


def data_hashes(recipe: DiffusionRecipe) -> dict[str, str]:
    """A hash of the files of each folder of latents and prompts, by its place in the recipe."""
    found = {}
    for split, source in (("train", recipe.data.train), ("eval", recipe.data.eval)):
        for key, (folder, files) in (files_of(source, recipe.folder) if source is not None else {}).items():
            found[f"data.{split}.{key}"] = combined_sha256(file_hashes(folder, files))
    return found


def dry_run(job: Job, resume: str) -> dict[str, Any]:
    """What a job's stages, or the one that is asked for, would do, with every check of the run, the base and its data;
    nothing is written."""
    recipe = cast(DiffusionRecipe, job.recipe)
    check_stage_order(job.recipe, Run(job.recipe, resume), job.only)
    resolve_precision(recipe.runtime.device, recipe.runtime.precision)  # raises for a device that is not there
    planned, folder, _ = job.base
    if folder is None:
        plan, source, parts = planned
        data = data_of(recipe, parts[0].model, source.folder)[0]
        job.say(f"{plan.source}: {counted(len(plan.steps), 'layer')} become {plan.steps[0].mechanism}")
    else:
        data = opened_at(folder, recipe).data
    stages = [
        {"stage": s.name, "kind": s.kind, "train": s.train, "steps": s.steps}
        for s in recipe.stages
        if job.only in (None, s.name)
    ]
    for one in stages:
        job.say(", ".join(f"{key} {value}" for key, value in one.items()))
    return {"stages": stages, "latents": len(data.latents)}


def evaluate(recipe: DiffusionRecipe) -> tuple[dict[str, Any], bytes]:
    """A converted pipeline, `model.base`, beside its own teacher: errors by noise level, and a picture of samples."""
    pillow(SAMPLES)
    accelerator = make_accelerator(recipe)
    base = Path(recipe.model.base).expanduser()
    tuner = Distiller(recipe, opened_at(base, recipe), accelerator)
    with progress("predictions", latents_compared(tuner) * len(recipe.eval.levels)) as advance:
        table = compare_predictions(tuner, advance)
    found = {"student": str(base), "noise": tuner.noise.kind, "predictions": {"student": table}}
    return found, picture(tuner)


def make_accelerator(recipe: DiffusionRecipe) -> Accelerator:
    """Devices and precision, as the recipe says and `accelerate launch` set them up."""
    precision = resolve_precision(recipe.runtime.device, recipe.runtime.precision)
    AcceleratorState._reset_state(True)  # another run in this process may have had another precision
    waits = InitProcessGroupKwargs(timeout=PATIENCE)
    return Accelerator(mixed_precision=precision, cpu=takes_cpu(recipe.runtime.device), kwargs_handlers=[waits])


def open_model(base: Path, recipe: DiffusionRecipe) -> tuple[Any, Noise]:
    """The converted transformer in float32, and its noise.

    Raises LinearizeError (exit 3) for a folder that linearize did not convert, for code that it did not write, and for
    models that take more than latents and prompts.
    """
    check_code_cache()
    diffusers = surgery.load_diffusers(base)
    diffusers.utils.logging.disable_progress_bar()
    parts = [*converted_parts(base, recipe.model.trust_remote_code)]
    surgery.check_one(base, parts)
    try:
        model = load_parts(base)[parts[0]]
    except Exception as error:  # loaders of many components raise as they like
        if resource_error(error) is not None:
            raise
        message = f"{base} cannot be loaded: {reason_of(error)}. Restore it, or convert its source again"
        raise IncompatibleError(message) from error
    surgery.check_inputs(base, model)
    return model, noise_of(recipe.noise, type(model).__name__, component(base, "scheduler", diffusers))


def component(folder: Path, name: str, diffusers: Any) -> Any:
    """A component of a pipeline by name, or None."""
    index = read_json(folder / surgery.INDEX_FILE) if (folder / surgery.INDEX_FILE).exists() else {}
    entry = index.get(name)
    kind = getattr(diffusers, str(entry[1]), None) if isinstance(entry, list) else None
    return kind.from_pretrained(folder / name) if kind is not None else None


def data_of(recipe: DiffusionRecipe, model: Any, folder: Path) -> tuple[Data, Data, Decode | None]:
    """The latents of training, those that predictions are compared on, and what makes images of latents, where there
    is a VAE."""
    vae = component(folder, "vae", surgery.load_diffusers(folder))
    encoder, decoder = (None, None) if vae is None else (partial(encode, vae), partial(decode, vae))
    data = read_data(recipe.data.train, recipe.folder, model, encoder)
    held = recipe.data.eval
    return data, data if held is None else read_data(held, recipe.folder, model, encoder), decoder


def scales(vae: Any) -> tuple[Any, Any]:
    """What latents of a VAE are moved and divided by before a transformer sees them."""
    if getattr(vae.config, "latents_mean", None) is not None:
        view = [1, -1, 1, 1, 1]
        return torch.tensor(vae.config.latents_mean).view(view), torch.tensor(vae.config.latents_std).view(view)
    return getattr(vae.config, "shift_factor", None) or 0.0, 1 / (getattr(vae.config, "scaling_factor", None) or 1.0)


@torch.no_grad()
def encode(vae: Any, images: Tensor) -> Tensor:
    """Images [B,3,height,width] -> latents as the transformer takes them."""
    film = getattr(vae.config, "latents_mean", None) is not None
    found = vae.encode(images[:, :, None] if film else images)
    latents = found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latent
    mean, std = scales(vae)
    return (latents - mean) / std


@torch.no_grad()
def decode(vae: Any, latents: Tensor) -> Tensor:
    """The inverse of `encode`."""
    mean, std = scales(vae)
    images: Tensor = vae.decode(latents.float().cpu() * std + mean).sample
    return images


# ---------------------------------------------------------------- what is saved


def kept_files(base: Path) -> list[Path]:
    """The files of a converted folder that its trained copy has: those that linearize.json lists and that are not
    written anew, and the transformer's weights by whatever name.

    Raises LinearizeError (exit 3) for a pipe, and for a link that leaves the folder.
    """
    listed = {*listed_files(base)} - {checkpoint.MANIFEST, "README.md", PICTURE}
    weights = base / parts_of(base)[0]
    found = [path for path in sorted(base.rglob("*")) if not path.is_dir()]
    found = [
        path
        for path in found
        if path.relative_to(base).as_posix() in listed or (path.parent == weights and path.suffix in surgery.WEIGHTS)
    ]
    for path in found:
        if path.suffix not in surgery.WEIGHTS:  # which may lie on another disk
            carried.check_file(path, base)
    return found


def save(base: Path, output: Path, values: dict[str, Tensor], report: dict[str, Any], png: bytes, verify: bool) -> None:
    """The base's folder with the trained `values` in their places, a card, and the picture; verified before it appears.

    Raises LinearizeError (exit 6) when a check fails.
    """
    manifest = read_json(base / checkpoint.MANIFEST)
    part = parts_of(base)[0]
    prefix = f"{part}/" if part else ""
    hashes = checkpoint.recorded_hashes(manifest)
    with output_folder(output, overwrite=True) as folder:
        for path in kept_files(base):
            name = path.relative_to(base)
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            header = read_header(path) if path.suffix == ".safetensors" and path.parent == base / part else {}
            if not header.keys() & values.keys():
                link_or_copy(path, target) if path.suffix in surgery.WEIGHTS else shutil.copyfile(path, target)
                continue

            def value(name: str, path: Path = path, header: dict[str, Entry] = header) -> Iterator[Tensor]:
                if name in values:
                    yield values[name].to(TORCH_DTYPES[header[name].dtype])
                else:
                    yield from read_tensor(path, header[name])

            found = write_shard(target, header, value)
            hashes["untouched"]["shards"].pop(name.as_posix(), None)
            for tensor, digest in found.items():
                kind = "written" if tensor in values or ".mixer." in tensor else "untouched"
                hashes[kind]["tensors"][prefix + tensor] = digest
        (folder / PICTURE).write_bytes(png)
        (folder / "README.md").write_text(card((base / "README.md").read_text("utf-8"), report), "utf-8")
        own = checkpoint.manifest(folder, Plan.from_json(manifest["plan"]), hashes)
        checkpoint.write_json(folder / checkpoint.MANIFEST, own)
        if verify:
            failed = [row for row in verify_folder(folder, trust_remote_code=True) if row.status == "failed"]
            if failed:
                message = f"verification failed: {failed[0].name}: {failed[0].detail}. The training is kept"
                raise CheckFailedError(message)


def card(text: str, report: dict[str, Any]) -> str:
    """The card of the conversion, with what training came to."""
    rows = zip(report["predictions"]["converted"], report["predictions"]["trained"], strict=True)
    table = "\n".join(f"| {was['level']:g} | {was['error']:.3f} | {now['error']:.3f} |" for was, now in rows)
    note = f"""Distilled on {report["latents"]:,} latents.

Error of predictions, |student - teacher| / |teacher|, by noise level (0: latents alone, 1: noise alone):

| level | converted | trained |
|---|---|---|
{table}

![samples: above the student's, below the teacher's]({PICTURE})
"""
    return text.replace(UNTRAINED, "See below for what it was trained to.") + "\n" + note
