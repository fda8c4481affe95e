"""Load the converted base for training, and save the trained model as a folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from linearize_kernels.hf.attention_hooks import TRAINED, evaluating, mixers_of

from ..checkpoint import card
from ..checkpoint import write as checkpoint
from ..checkpoint.atomic import output_folder
from ..checkpoint.carried import code_of
from ..checkpoint.code import SourceClasses, code_files
from ..checkpoint.manifest import CARD, is_linearized, read_plan
from ..checkpoint.provenance import (
    LORA_FOLDER,
    behind,
    check_code,
    check_code_cache,
    copying_code,
    open_config,
    outdated,
)
from ..checkpoint.shards import TORCH_DTYPES, link_or_copy, read_tensor, sha256, write_shard
from ..checkpoint.source import Entry, Source, find_shards, read_header
from ..checkpoint.upgrade import plan_upgrade, write_code
from ..convert import disagree
from ..errors import CheckFailedError, IncompatibleError, LinearizeError, reason_of, resource_error, some
from ..measure.positions import TRAINED_LENGTH, trained_length
from ..plan.plan import Plan
from ..probe.probe import model_class_of
from ..probe.trace import quiet
from ..recipe.recipe import Recipe, portable
from ..verify.child.inputs import auto_class, outputs, writes_text
from ..verify.reload import TOO_LARGE, check_keys, check_steps, compare, fits_twice, reload_logits, scratch_folder
from ..verify.tolerances import RELOADED, ROUNDED_KL, ROUNDED_RMS
from .student import ADAPTER, Student

# ---------------------------------------------------------------- loading


def load_converted(folder: Path, dtype: Any, trust_remote_code: bool) -> Any:
    """The linearized model in `folder`. Its code runs when it is byte for byte what a version of linearize wrote; where
    that cannot decode here, this version's code runs on the same weights.

    Raises LinearizeError (exit 3) for a folder that linearize did not write, other code without trust, and damaged
    or missing weights.
    """
    plan = check_code(folder, trust_remote_code)
    for shard in sorted(folder.glob("*.safetensors")):
        read_header(shard)
    planned = plan_upgrade(folder, trust_remote_code=trust_remote_code) if outdated(folder, plan) else None
    if planned is None:
        return load_whole(folder, dtype, True)
    with scratch_folder() as scratch:
        for path in folder.iterdir():
            if path.is_file() and path.name not in planned.code and path.name != "config.json":
                (scratch / path.name).symlink_to(path.resolve())
        write_code(scratch, planned)
        model = load_whole(scratch, dtype, True)
    model.config._name_or_path = str(folder)
    return model


def load_whole(folder: Path, dtype: Any, trust_remote_code: bool) -> Any:
    """`from_pretrained` of its Auto class, or of the class of transformers that its config names where that writes no
    text. It fills in what is missing at random and only reports it.

    Raises LinearizeError (exit 3) for a config that describes another model, naming the weights that are missing or
    have another shape.
    """
    try:
        with quiet():
            with copying_code() if trust_remote_code else contextlib.nullcontext():
                config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            named = None if getattr(config, "auto_map", None) else (config.architectures or [""])[0]
            loader: Any = getattr(transformers, named or "", None)
            if loader is None or loader.can_generate():
                loader = getattr(transformers, auto_class(config))
            loaded: Any = loader.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are told below
            )
    except Exception as error:  # loaders of many architectures raise as they like
        if trust_remote_code and isinstance(error, OSError):
            check_code_cache()  # which says what to do
        if isinstance(error, LinearizeError) or resource_error(error) is not None:
            raise
        raise IncompatibleError(
            f"{folder} cannot be loaded ({type(error).__name__}: {reason_of(error)}). Download or convert it again"
        ) from error
    model, report = loaded
    if report["mismatched_keys"]:
        name, found, expected = min(report["mismatched_keys"])
        raise disagree(folder, f"{name} is {list(found)}, the config asks for {list(expected)}")
    absent = sorted(map(str, report["missing_keys"]))
    if absent:
        raise IncompatibleError(
            f"{folder} lacks weights of {type(model).__name__}: {some(absent)}. Download it again, or choose the model "
            "with its head"
        )
    return model


def meta_model(
    folder: Path | None,
    planned: tuple[Plan, Source, SourceClasses] | None,
    dtype: Any,
    trust_remote_code: bool,
    device: str = "meta",
) -> Any:
    """The linearized model without memory behind its weights: of a conversion that is planned, or of a folder, with the
    code of this version even where an earlier one wrote it. Of a folder with a random model that keeps its softmax,
    that model.

    `dtype` None is the one that the weights are stored in. On another `device` its weights are random.
    """
    with scratch_folder() as scratch:
        if planned is not None:
            plan, source, natives = planned
            folder = scratch / f"planned{os.getpid()}"  # transformers imports the same code under the same name once
            folder.mkdir()
            for path in code_of(source.folder):  # which ours imports
                shutil.copyfile(path, folder / path.name)
            for name, text in code_files(plan, natives).items():
                (folder / name).write_text(text, "utf-8")
            checkpoint.write_json(folder / "config.json", checkpoint.converted_config(source.config, plan, natives))
        else:
            assert folder is not None
            if not is_linearized(folder):
                config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
                with quiet(), torch.device(device):
                    return model_class_of(config)._from_config(config, dtype=dtype or config.dtype or torch.float32)
            plan = check_code(folder, trust_remote_code)
            upgrade = plan_upgrade(folder, trust_remote_code=trust_remote_code) if behind(folder, plan) else None
            if upgrade is not None:
                folder = Path(scratch)
                write_code(folder, upgrade)
        config = open_config(folder)
        with quiet(), torch.device(device):
            dtype = dtype or getattr(torch, plan.dtype)
            return getattr(transformers, auto_class(config)).from_config(config, dtype=dtype, trust_remote_code=True)


# ---------------------------------------------------------------- saving


def save_final(
    student: Student,
    base: Path,
    output: Path,
    recipe: Recipe,
    report: dict[str, Any],
    say: Any,
    pictures: Mapping[str, tuple[bytes, str]] | None = None,
    replaces: Collection[str] = (),
) -> None:
    """Write the finished model, reload it in a clean process, compare, then put it in place.

    Whatever was not trained is linked or copied from the base, byte for byte. The card has the `report`'s figures and
    the `pictures`: name -> (PNG, what it shows).
    The model of an earlier run of that name stays until then; `replaces` has the names of its files that no
    linearize.json lists.
    """
    plan = read_plan(base)
    keep_adapter = recipe.keeps_adapter
    student.model.to("cpu")
    trained = None
    if recipe.finish.verify and fits_twice([base]):
        trained = logits_of(student.model.float())
    with output_folder(output, overwrite=True, carried=replaces) as folder:
        changed = finish_adapters(student, folder if keep_adapter else None)
        checkpoint.copy_carried(base, folder)
        shutil.copyfile(base / checkpoint.INDEX, folder / checkpoint.INDEX)
        config = json.loads((base / "config.json").read_text("utf-8"))
        facts = {TRAINED_LENGTH: trained_length(recipe), **({TRAINED: True} if changed else {})}
        checkpoint.write_json(folder / "config.json", config | facts)
        hashes = write_trained(student, base, folder, changed)
        for path in folder.glob("adapter/*.safetensors"):
            hashes["written"]["shards"][path.relative_to(folder).as_posix()] = sha256(path)
        pictures = pictures or {}
        for name, (data, _) in pictures.items():
            (folder / card.PICTURES).mkdir(exist_ok=True)
            (folder / card.PICTURES / name).write_bytes(data)
        shown = {name: about for name, (_, about) in pictures.items()}
        (folder / "README.md").write_text(card.model_card(plan, base, recipe, report, shown), "utf-8")
        own = {"teacher": report["teacher"]} if report.get("teacher") else {}
        own["recipe"] = portable(recipe.resolved())
        manifest = checkpoint.manifest(folder, plan, hashes)
        checkpoint.write_json(folder / checkpoint.MANIFEST, {**manifest, **checkpoint.past(base), **own})
        if recipe.finish.verify:
            say(verify_final(folder, plan, student, trained, recipe))
    apart = ", without its LoRA, which lies in its folder adapter (see its README.md)" if keep_adapter else ""
    say(f"saved {output}{apart}")


def save_plain(
    student: Student,
    base: Path,
    output: Path,
    recipe: Recipe,
    report: dict[str, Any],
    say: Any,
    replaces: Collection[str] = (),
) -> None:
    """Write a trained model that keeps its softmax as an ordinary folder of transformers, reload and compare it, then
    put it in place. All but weights and card is copied from the `base`, the random model; `replaces` as above."""
    student.model.to("cpu")
    headers = {shard: read_header(shard) for shard in find_shards(base, True)[0]}
    carried = [*(path.name for path in base.iterdir()), CARD, *replaces]
    with output_folder(output, overwrite=True, carried=carried) as folder:
        for path in base.iterdir():
            if path not in headers:
                shutil.copyfile(path, folder / path.name)
        known = {name for header in headers.values() for name in header}
        values = stored_names(student.model, student.drifted, known, folder)
        for shard, header in headers.items():
            write_shard(folder / shard.name, header, functools.partial(_value, values, shard, header))
        (folder / CARD).write_text(card.plain_card(recipe, report), "utf-8")
        if recipe.finish.verify:
            say(verify_plain(folder, student, recipe.model.trust_remote_code))
    say(f"saved {output}, an ordinary model of transformers")


def verify_plain(folder: Path, student: Student, trust_remote_code: bool) -> str:
    """Reload a model that keeps its softmax; raises LinearizeError: 3 for weights that are missing, 6 unless its logits
    are the student's in the dtype that is saved."""
    if not fits_twice([folder]):
        return f"not reloaded{TOO_LARGE}"
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    round_weights(student.model.float(), config.dtype or torch.float32)
    reloaded = logits_of(load_whole(folder, torch.float32, trust_remote_code))
    difference = compare(reloaded, logits_of(student.model), "reloading changed logits by", RELOADED)
    return f"reloaded: no weight missing; logits equal the trained model's (largest difference {difference:.1e})"


def finish_adapters(student: Student, folder: Path | None) -> set[str]:
    """Merge LoRA layers into the source weights, or save them as `folder`/adapter and take them off.

    Returns the names of the source weights that training changed.
    """
    changed = student.drifted
    if student.lora is None:
        return changed
    if folder is None:
        changed |= student.adapted()
        student.lora.merge_and_unload()
        return changed
    target = folder / LORA_FOLDER
    target.mkdir()
    own = {name: p.detach() for name, p in student.named_parameters() if ".lora_" in name}
    named = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": value.contiguous() for name, value in own.items()}
    save_file(named, target / "adapter_model.safetensors", {"format": "pt"})
    student.lora.peft_config[ADAPTER].save_pretrained(target)
    student.lora.unload()
    return changed


def write_trained(student: Student, base: Path, folder: Path, changed: set[str]) -> checkpoint.Hashes:
    """The shards of the base with the trained values in their places; a shard without any is linked.

    Returns the hashes: of what nothing has changed since the source, and of all else.
    """
    headers = {shard: read_header(shard) for shard in find_shards(base, True)[0]}
    precise = fp32_names(student.model)
    for header in headers.values():  # an earlier version wrote these in the model's dtype
        header |= {
            name: Entry("F32", header[name].shape)
            for name in header.keys() & precise
            if header[name].dtype in ("F16", "BF16")
        }
    known = {name for header in headers.values() for name in header}
    values = stored_names(student.model, changed, known, folder)
    values |= {name: p.detach() for name, p in student.named_parameters() if ".mixer." in name}
    missing = values.keys() - known
    if missing:
        raise RuntimeError(f"the converted base has no {', '.join(sorted(missing))}")
    manifest = json.loads((base / checkpoint.MANIFEST).read_text("utf-8"))
    before = checkpoint.recorded_hashes(manifest)
    shards, untouched = before["untouched"]["shards"], before["untouched"]["tensors"]
    found = checkpoint.no_hashes()
    written = before["written"]["tensors"]
    for shard, header in headers.items():
        if not header.keys() & values.keys():
            link_or_copy(shard, folder / shard.name)
            found["untouched"]["shards"] |= {shard.name: shards[shard.name]} if shard.name in shards else {}
            continue
        hashes = write_shard(folder / shard.name, header, functools.partial(_value, values, shard, header))
        kept = {name for name in hashes if name not in values and (shard.name in shards or name in untouched)}
        untouched |= {name: value for name, value in hashes.items() if name in kept}
        written |= {name: value for name, value in hashes.items() if name not in kept}
    found["untouched"]["tensors"] = {name: value for name, value in untouched.items() if name not in values}
    found["written"]["tensors"] = written
    checkpoint.cover(folder, found)  # what the base linked and an earlier version wrote
    return found


def _value(values: dict[str, Tensor], shard: Path, header: dict[str, Entry], name: str) -> Iterator[Tensor]:
    """A tensor of the base's shard, or what training made of it."""
    if name not in values:
        yield from read_tensor(shard, header[name])
    else:
        yield values[name].to(TORCH_DTYPES[header[name].dtype])


def stored_names(model: Any, names: set[str], known: set[str], scratch: Path) -> dict[str, Tensor]:
    """Trained source tensors by the names that the base's shards (`known`) give them."""
    if not names:
        return {}
    tensors = {name: value for name, value in model.state_dict().items() if name in names}
    values: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(dir=scratch) as work, quiet():
        model.save_pretrained(work, state_dict=tensors)  # transformers undoes its own renames
        for shard in Path(work).glob("*.safetensors"):
            values |= load_file(shard)
    for alias, original in model.all_tied_weights_keys.items():
        if original in values and alias in known:
            values[alias] = values[original]
            if original not in known:
                del values[original]
        elif alias in values and known.isdisjoint({alias, alias.removeprefix(f"{model.base_model_prefix}.")}):
            values[original] = values.pop(alias)  # its head comes before its embedding, and gave the name
    short = {name: name.removeprefix(f"{model.base_model_prefix}.") for name in values}
    return {name if name in known else short[name]: value for name, value in values.items()}


# ---------------------------------------------------------------- verifying


def logits_of(model: Any) -> Tensor:
    """Logits, or what else comes out, of the inputs that clean processes give, by the same few lines."""
    with evaluating(model):
        return outputs(model)


def verify_final(folder: Path, plan: Plan, student: Student, trained: Tensor | None, recipe: Recipe) -> str:
    """Reload in a clean process; raises LinearizeError (exit 6) unless tensors and logits are those of the student.

    Three comparisons: merging adapters changes nothing, saving rounds the weights, reloading changes nothing again.
    Rounding is no defect of the saved model: its size is printed, with a warning where it is large.
    """
    message = "reloaded in a clean process: {} tensors, none missing, none unexpected"
    if trained is None:
        return message.format(check_keys(folder)) + TOO_LARGE
    words = student.model.config.get_text_config().vocab_size if writes_text(student.model) else 0
    if student.lora is not None and not recipe.keeps_adapter:
        merged = logits_of(student.model)
        compare(merged, trained, "merging adapters changed logits by", RELOADED)
    else:
        merged = trained
    precise, headers = fp32_names(student.model), map(read_header, folder.glob("*.safetensors"))
    dtypes = {entry.dtype for header in headers for name, entry in header.items() if name not in precise}
    round_weights(student.model, getattr(torch, plan.dtype))
    rounded = logits_of(student.model)
    rounding = ""
    if not recipe.keeps_adapter:
        change, name, limit = drift(rounded, merged, words)
        rounding = f"; rounding to {plan.dtype} changed them by {name} {change:.1e}" if change else ""
        if not change <= limit:
            rounding += f" (warning: more than {limit:.0e}; with model.dtype=float32 nothing is rounded)"
    # With several dtypes in the shards, or trained in a narrower one, what was loaded for training was rounded too.
    loaded = torch.finfo(getattr(torch, recipe.model.dtype or plan.dtype)).eps
    count, reloaded, child = reload_logits(folder)
    steps = check_steps(child)
    if len(dtypes) > 1 or loaded > torch.finfo(getattr(torch, plan.dtype)).eps:
        change, name, limit = drift(reloaded, rounded, words)
        if not change <= limit:
            what = f"verification failed: reloading changed logits by {name} {change:.1e} (limit {limit:.0e})"
            raise CheckFailedError(what)
        equal = "; logits equal the trained model's" + (f" up to rounding ({name} {change:.1e})" if change else "")
    else:
        difference = compare(reloaded, rounded, "reloading changed logits by", RELOADED)
        equal = f"; logits equal the trained model's (largest difference {difference:.1e})"
    return message.format(count) + equal + steps + rounding


def drift(ours: Tensor, theirs: Tensor, words: int) -> tuple[float, str, float]:
    """How far rounding moved outputs, the measure's name and what is much: for logits over `words` words the mean KL in
    nats, for others (`words` 0) the root mean square of the difference over that of the outputs.

    A largest difference says little: it grows with the number of logits, and 5e-2 of the largest may be a KL of 2e-4.
    """
    if words and ours.numel() % words == 0:
        p, q = (x.view(-1, words).log_softmax(-1) for x in (theirs, ours))
        return float((p.exp() * (p - q)).sum(-1).mean()), "a mean KL in nats of", ROUNDED_KL
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-6)), "a root mean square of", ROUNDED_RMS


def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Round what a checkpoint holds of a model to `dtype`; `to` would round the frequencies of a rotary embedding too,
    which a loaded model computes anew in float32."""
    precise = fp32_names(model)
    for name, value in model.state_dict().items():
        if value.is_floating_point() and name not in precise:
            value.copy_(value.to(dtype))


def fp32_names(model: Any) -> set[str]:
    """Names of the parameters that stay in float32 by the model's own code; code of before 2026-11-28 has none."""
    own: dict[str, Any] = {path: getattr(mixer, "fp32_names", list)() for path, mixer in mixers_of(model).items()}
    return {f"{path}.mixer.{name}" for path, names in own.items() for name in names}
