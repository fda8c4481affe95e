"""Finetune a diffusion transformer, the story on one screen: convert if asked, train, compare, save, verify.

Read `finetune` first; train.py has the stages, latents.py the data, evaluate.py what is compared.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor

from ..checkpoint import carried
from ..checkpoint import write as checkpoint
from ..checkpoint.atomic import output_folder, write_atomically, write_result
from ..checkpoint.card import UNTRAINED
from ..checkpoint.manifest import base_hashes, listed_files
from ..checkpoint.provenance import check_code_cache
from ..checkpoint.shards import TORCH_DTYPES, link_or_copy, read_tensor, write_shard
from ..checkpoint.source import Entry, read_header, read_json
from ..convert import check_disk, separate
from ..errors import Exit, LinearizeError, check_file, did_you_mean, reason_of, resource_error, undamaged
from ..hub.push import check_access
from ..plan.plan import Plan
from ..recipe.recipe import FREE, diff_resolved
from ..terminal.output import counted
from ..terminal.progress import progress
from ..train.device import resolve_precision, takes_cpu
from ..train.runtime import PATIENCE
from ..verify.child.latents import load_parts, parts_of
from . import convert as surgery
from .evaluate import compare_predictions, latents_compared, picture, pillow, sample, setback
from .latents import Data, Noise, noise_of, read_data
from .recipe import DiffusionRecipe
from .record import RECORD, begin, check_owned, finished, read_record, write_record
from .verify import origin_of, refuse_code, verify_folder

Say = Callable[[str], None]
Decode = Callable[[Tensor], Tensor]
PICTURE, REPORT, STATE = "samples.png", "report.json", "state.pt"


def finetune(
    recipe: DiffusionRecipe, *, only: str | None = None, resume: str = "auto", say: Say = print
) -> dict[str, Any]:
    """Run a recipe of latents; returns the report: `output`, and `predictions` before and after by noise level.

    `output` is None when `only` left later stages to do. Raises LinearizeError: 2 for the recipe, 3 for what does not
    fit, 4 for resources, 6 for a loss that is not finite or a failed verification, 130 when interrupted (state saved).
    """
    folder = Path(recipe.output_dir)
    check_run(recipe, folder, only, resume)
    if finished(folder, resume):
        say(f"{folder / 'final'} is finished already; `--resume never` would start over")
        with undamaged(folder / REPORT, f"Remove {folder / 'final'}, and the same command writes both again"):
            return {**read_json(folder / REPORT), "output": str(folder / "final")}
    pillow()
    accelerator = make_accelerator(recipe)
    main = accelerator.is_main_process
    from .train import Distiller

    base = Path(recipe.model.base).expanduser()
    planned: tuple[Plan, Any, list[Any]] | None = None
    opened: tuple[Any, Noise] | None = None
    if recipe.convert is not None:
        planned = plan(recipe)
        known: Any = planned[2][0].model
        if not (folder / "converted").exists():
            check_disk(planned[0], planned[1], folder / "converted")
    else:
        opened = open_model(base, recipe)
        known = opened[0]
    data, held, decode = data_of(recipe, known, base)
    if recipe.finish.push is not None and main:
        check_access(recipe.finish.push)
    if main:
        converted = folder / "converted" if planned is not None else base
        there = planned is None or (resume == "auto" and converted.exists())
        if there:
            kept_files(converted)
        record, notes = begin(recipe, folder, converted if there else None, resume)
        for note in notes:
            say(note)
        if resume == "never":  # all that can be known is checked
            start_over(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder, record)
        write_atomically(folder / "recipe.json", json.dumps(recipe.resolved(), indent=2) + "\n")
        if planned is not None and not there:
            surgery.convert(*planned, converted, level="keys", seed=recipe.seed, say=say)
            write_record(folder, record | {"base": base_hashes(converted, new=True)})
    accelerator.wait_for_everyone()
    if opened is None:
        base = folder / "converted"
        opened = open_model(base, recipe)
    model, noise = opened
    tuner = Distiller(recipe, model, data, noise, accelerator)

    def errors() -> list[dict[str, float]]:
        return compare_predictions(model, tuner.predict, tuner.target, held, noise, recipe.eval, recipe.seed)

    def log(record: dict[str, Any]) -> None:
        if main:
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    before = errors()
    start, step, state = tuner.restore(folder)
    for number, stage in enumerate(recipe.stages):
        if number < start:
            continue
        if only is not None and stage.name != only:  # a later one, for `check_run` saw that those before are done
            break
        say(f"{stage.name}: {stage.steps:,} steps of {stage.batch.blocks * accelerator.num_processes} latents")
        tuner.run(number, folder, step if number == start else 0, state if number == start else None, log)
    complete = only is None or only == recipe.stages[-1].name
    report: dict[str, Any] = {"output": str(folder / "final") if complete else None, "noise": noise.kind}
    report["latents"] = len(data.latents)
    report["predictions"] = {"converted": before, "trained": errors()}
    if complete and main and (message := setback(*report["predictions"].values())):
        say(message)
    if complete and main:
        drawn = {"student": tuner.predict, "teacher": tuner.target}
        made = {n: sample(model, one, held, noise, recipe.eval, recipe.seed) for n, one in drawn.items()}
        png = picture(made, decode)
        write_result(folder / PICTURE, png)
        # First, for a run with `final` counts as finished and has a report.
        write_atomically(folder / REPORT, json.dumps(report | {"output": "final"}, indent=2) + "\n")
        save(base, folder / "final", model, trained_names(tuner), report, png, recipe)
        write_record(folder, read_record(folder) | {"finished": True})
        (folder / STATE).unlink(missing_ok=True)
        say(f"saved {folder / 'final'}; samples of student and teacher are in {folder / PICTURE}")
        if recipe.finish.push is not None:
            from .push import push_saved

            report["pushed"] = push_saved(folder / "final", recipe.finish.push, recipe.model.trust_remote_code, say)
    accelerator.wait_for_everyone()
    return report


def dry_run(recipe: DiffusionRecipe, say: Say, only: str | None = None, resume: str = "auto") -> dict[str, Any]:
    """What a recipe, or the stage `only`, would do, with every check of the run, the base and its data; nothing is
    written."""
    check_run(recipe, Path(recipe.output_dir), only, resume)
    if recipe.convert is not None:
        planned, source, parts = plan(recipe)
        data = data_of(recipe, parts[0].model, Path(source.folder))[0]
        say(f"{planned.source}: {counted(len(planned.steps), 'layer')} become {planned.steps[0].mechanism}")
    else:
        model, _ = open_model(base := Path(recipe.model.base).expanduser(), recipe)
        data = data_of(recipe, model, base)[0]
    stages = [
        {"stage": s.name, "kind": s.kind, "train": s.train, "steps": s.steps}
        for s in recipe.stages
        if only in (None, s.name)
    ]
    for one in stages:
        say(", ".join(f"{key} {value}" for key, value in one.items()))
    return {"stages": stages, "latents": len(data.latents)}


def evaluate(recipe: DiffusionRecipe) -> tuple[dict[str, Any], bytes]:
    """A converted pipeline, `model.base`, beside its own teacher: errors by noise level, and a picture of samples."""
    from .train import Distiller

    pillow()
    accelerator = make_accelerator(recipe)
    base = Path(recipe.model.base).expanduser()
    model, noise = open_model(base, recipe)
    data, held, decode = data_of(recipe, model, base)
    tuner = Distiller(recipe, model, data, noise, accelerator)
    given = (model, tuner.predict, tuner.target, held, noise, recipe.eval, recipe.seed)
    with progress("predictions", latents_compared(held, recipe.eval) * len(recipe.eval.levels)) as advance:
        table = compare_predictions(*given, advance)
    drawn = {"student": tuner.predict, "teacher": tuner.target}
    made = {n: sample(model, one, held, noise, recipe.eval, recipe.seed) for n, one in drawn.items()}
    return {"student": str(base), "noise": noise.kind, "predictions": {"student": table}}, picture(made, decode)


def make_accelerator(recipe: DiffusionRecipe) -> Accelerator:
    """Devices and precision, as the recipe says and `accelerate launch` set them up."""
    precision = resolve_precision(recipe.runtime.device, recipe.runtime.precision)
    AcceleratorState._reset_state(True)  # another run in this process may have had another precision
    waits = InitProcessGroupKwargs(timeout=PATIENCE)
    return Accelerator(mixed_precision=precision, cpu=takes_cpu(recipe.runtime.device), kwargs_handlers=[waits])


def check_run(recipe: DiffusionRecipe, folder: Path, only: str | None, resume: str) -> None:
    """What is known before anything is read: the stage, and the folder of the run. Raises LinearizeError (exit 2)."""
    from .train import check_state, read_state

    check_base(recipe)
    resolve_precision(recipe.runtime.device, recipe.runtime.precision)  # raises for a device that is not there
    names = [stage.name for stage in recipe.stages]
    if only is not None and only not in names:
        raise LinearizeError(f"--stage {only}: the recipe has {', '.join(names)}.{did_you_mean(only, names)}")
    if resume not in ("auto", "never"):
        raise LinearizeError(f"--resume {resume}: a run on latents goes on from its own state; give auto or never")
    for name in ("recipe.json", RECORD, STATE, REPORT, "metrics.jsonl"):
        check_file(folder / name)
    if (folder / "recipe.json").exists():
        old, new = (
            {key: value for key, value in one.items() if key not in FREE}
            for one in (read_json(folder / "recipe.json"), recipe.resolved())
        )
        changed = diff_resolved(old, new) if resume == "auto" else []
        if changed:
            raise LinearizeError(f"{folder} was begun by another recipe: {'; '.join(changed[:5])}. Choose another name")
    elif folder.exists() and {path.name for path in folder.iterdir()} - {RECORD}:
        raise LinearizeError(f"{folder} is not empty, and no run on latents. Choose another output_dir")
    if finished(folder, resume):
        return
    check_owned(folder, resume)
    known, state = resume == "auto" and (folder / STATE).exists(), folder / STATE
    if known:
        check_state(state)
    if only is not None:
        done = read_state(state, "cpu", mmap=True)["stage"] if known else 0
        if names.index(only) > done:
            message = f"--stage {only} needs {names[done]}, which is not finished in {folder}"
            raise LinearizeError(f"{message}. Run --stage {names[done]} first, or all without --stage")


def check_base(recipe: DiffusionRecipe) -> None:
    """Refuse a base that is no folder of diffusers (exit 3), and a run inside of it or around it (exit 2)."""
    if not surgery.holds_diffusers(recipe.model.base):
        message = f"model.base {recipe.model.base} is no folder of a pipeline or transformer of diffusers"
        raise LinearizeError(f"{message}, which latents are for", Exit.INCOMPATIBLE)
    if not separate(Path(recipe.model.base).expanduser(), Path(recipe.output_dir)):
        message = f"output_dir {recipe.output_dir} and model.base {recipe.model.base} must be separate folders"
        raise LinearizeError(f"{message}: neither inside the other. Set output_dir to another folder")


def start_over(folder: Path) -> None:
    """Remove what an earlier run on latents left in its folder, but its finished model, which `save` replaces."""
    if (folder / "recipe.json").exists():
        shutil.rmtree(folder / "converted", ignore_errors=True)
        for name in (STATE, "metrics.jsonl"):
            (folder / name).unlink(missing_ok=True)


def plan(recipe: DiffusionRecipe) -> tuple[Plan, Any, list[Any]]:
    """The conversion that a recipe asks for. Raises LinearizeError with the exit code of the obstacle."""
    asked = recipe.convert
    assert asked is not None
    planned = surgery.plan_conversion(
        recipe.model.base,
        asked.mechanism,
        layers=asked.layers,
        keep_softmax=asked.keep_softmax,
        keep_heads=asked.keep_heads,
        kept_window=asked.kept_window,
        options=asked.options,
        allow_drop=asked.allow_drop,
        copy=asked.copy_weights,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    check_one(recipe.model.base, [part.name for part in planned[2]])
    check_inputs(recipe.model.base, planned[2][0].model)
    return planned


def check_one(folder: str | Path, parts: list[str]) -> None:
    """Refuse (exit 3) a pipeline of several transformers, each of which has noise levels of its own."""
    if len(parts) != 1:
        message = f"{folder} has {len(parts)} transformers that are linear, and one is trained at a time"
        raise LinearizeError(f"{message}: give the folder of one of them", Exit.INCOMPATIBLE)


def check_inputs(folder: str | Path, model: Any) -> None:
    """Refuse (exit 3) a transformer that takes more than latents and prompts."""
    extra = [key for key in ("image_dim", "added_kv_proj_dim", "guidance_embeds") if model.config.get(key)]
    if extra:
        message = f"{folder}: the transformer has {', '.join(extra)}, and takes more than latents and prompts"
        raise LinearizeError(f"{message}. Train it as docs/diffusers.md says", Exit.INCOMPATIBLE)


def open_model(base: Path, recipe: DiffusionRecipe) -> tuple[Any, Noise]:
    """The converted transformer in float32, and its noise.

    Raises LinearizeError (exit 3) for a folder that linearize did not convert, for code that it did not write, and for
    models that take more than latents and prompts.
    """
    check_code_cache()
    diffusers = surgery.load_diffusers(base)
    diffusers.utils.logging.disable_progress_bar()
    name = converted_part(base, recipe.model.trust_remote_code)
    try:
        model = load_parts(base)[name]
    except Exception as error:  # loaders of many components raise as they like
        if resource_error(error) is not None:
            raise
        message = f"{base} cannot be loaded: {reason_of(error)}. Restore it, or convert its source again"
        raise LinearizeError(message, Exit.INCOMPATIBLE) from error
    check_inputs(base, model)
    return model, noise_of(recipe.noise, type(model).__name__, component(base, "scheduler", diffusers))


def converted_part(base: Path, trust: bool) -> str:
    """The name of the converted transformer in a folder. Raises LinearizeError (exit 3) where there is none."""
    parts = parts_of(base)
    configs = {part: read_json(base / part / "config.json") for part in parts} if parts else {}
    if not parts or not all(config.get("linearize") for config in configs.values()):
        message = f"{base} holds no transformer that linearize converted. Convert it, or add convert to the recipe"
        raise LinearizeError(message, Exit.INCOMPATIBLE)
    check_one(base, parts)
    if not trust:
        refuse_code(base, origin_of(base, configs))
    return parts[0]


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
    data = read_data(recipe.data.train, recipe.folder, model, encoder(vae))
    held = recipe.data.eval
    return data, data if held is None else read_data(held, recipe.folder, model, encoder(vae)), decoder(vae)


def scales(vae: Any) -> tuple[Any, Any]:
    """What latents of a VAE are moved and divided by before a transformer sees them."""
    if getattr(vae.config, "latents_mean", None) is not None:
        view = [1, -1, 1, 1, 1]
        return torch.tensor(vae.config.latents_mean).view(view), torch.tensor(vae.config.latents_std).view(view)
    return getattr(vae.config, "shift_factor", None) or 0.0, 1 / (getattr(vae.config, "scaling_factor", None) or 1.0)


def encoder(vae: Any) -> Callable[[Tensor], Tensor] | None:
    """Images [B,3,height,width] -> latents as the transformer takes them; None without a VAE."""
    if vae is None:
        return None
    film = hasattr(vae.config, "latents_mean") and vae.config.latents_mean is not None

    @torch.no_grad()
    def encode(images: Tensor) -> Tensor:
        found = vae.encode(images[:, :, None] if film else images)
        latents = found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latent
        mean, std = scales(vae)
        return (latents - mean) / std

    return encode


def decoder(vae: Any) -> Decode | None:
    """The inverse of `encoder`."""
    if vae is None:
        return None

    @torch.no_grad()
    def decode(latents: Tensor) -> Tensor:
        mean, std = scales(vae)
        images: Tensor = vae.decode(latents.float().cpu() * std + mean).sample
        return images

    return decode


# ---------------------------------------------------------------- what is saved


def trained_names(tuner: Any) -> set[str]:
    return {name for stage in tuner.recipe.stages for name in tuner.trained(stage)}


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


def save(
    base: Path, output: Path, model: Any, names: set[str], report: dict[str, Any], png: bytes, recipe: DiffusionRecipe
) -> None:
    """The base's folder with the trained values in their places, a card, and the picture; verified before it appears.

    Raises LinearizeError (exit 6) when a check fails.
    """
    manifest = read_json(base / checkpoint.MANIFEST)
    part = parts_of(base)[0]
    prefix = f"{part}/" if part else ""
    values = {name: value.detach().cpu() for name, value in model.named_parameters() if name in names}
    hashes = checkpoint.no_hashes() | {kind: manifest[kind] for kind in checkpoint.no_hashes() if kind in manifest}
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
        if recipe.finish.verify:
            failed = [row for row in verify_folder(folder, trust_remote_code=True) if row.status == "failed"]
            if failed:
                message = f"verification failed: {failed[0].name}: {failed[0].detail}. The training is kept in {STATE}"
                raise LinearizeError(message, Exit.CHECK_FAILED)


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
