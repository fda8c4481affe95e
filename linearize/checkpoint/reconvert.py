"""Convert again what is converted: read what is there, and write the result; trained weights stay as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckFailedError, IncompatibleError, LinearizeError, undamaged
from ..plan.mechanisms import with_own_eps
from ..plan.plan import Plan
from ..plan.reconvert import check_unused, plan_reconversion, same_mechanism
from ..plan.request import Request
from ..probe.probe import found_in
from ..verify.reload import scratch_folder
from . import write as checkpoint
from .adopt import native_config
from .carried import carried_files, check_carried
from .code import MODELING_FILE, SourceClasses, code_files
from .known_code import known_files
from .provenance import (
    check_code,
    check_mixers,
    has_lora_apart,
    natives_of,
    read_plan,
    untrained_mixers,
    with_present_options,
)
from .shards import place_shard, read_tensor, write_shard
from .source import Places, Source, read_header, read_json, tensor_places


def mixer_prefixes(source: Source) -> tuple[str, ...]:
    """How names of tensors of mixers begin in a converted model; its source may have modules called `mixer`, too."""
    return tuple(f"{layer['site']['path']}.mixer." for layer in source.config["linearize"]["layers"])


def plan_converted(
    source: Source, mechanism: str | None, restore: str, *, weights: bool, trust_remote_code: bool, **asked: Any
) -> tuple[Plan, Source, SourceClasses]:
    """`plan_conversion` for a model that is converted; `asked` are fields of a `Request`.

    Raises LinearizeError: 2 for layers that are what they shall become, 3 for a folder that linearize did not write, or
    that is edited, and for a LoRA that lies apart.
    """
    folder = source.folder
    old, _ = with_present_options(check_code(folder, trust_remote_code))
    read_plan(folder)  # which says what to do with one that transformers saved
    with undamaged(folder / checkpoint.MANIFEST, "Download the model again"):
        recipe = read_json(folder / checkpoint.MANIFEST).get("recipe")
        apart = recipe is not None and has_lora_apart(recipe)
    if apart:
        raise IncompatibleError(
            f"{source.name}: the LoRA in its folder adapter is apart from its weights, and the result would be without "
            "it. Train it again with finish.merge_lora=true"
        )
    if weights:
        check_carried(folder)
        check_mixers(folder, old)
    try:
        head = natives_of(old).head
    except (ValueError, LinearizeError) as error:
        message = f"{source.name} is {old.architecture} of code that came with its source. Convert the source again"
        raise IncompatibleError(message) from error
    natives = SourceClasses(native_config(source, old), head)
    given = dict(asked.pop("options", None) or {})
    options = given
    if asked.get("layers", "all") == "all":  # none becomes linear
        check_unused(mechanism, given, restore)
        mechanism, options = old.linear[0].mechanism, {}
    elif mechanism is None:
        mechanism, options = same_mechanism(old, given, source.name)
    else:
        options = with_own_eps(mechanism, given, natives.source_config)
    request = Request(mechanism, options=options, **asked)
    found = found_in(natives.source_config, head)
    untrained = untrained_mixers(folder, old)
    return plan_reconversion(request, restore, given, old, found, source.name, untrained, recipe), source, natives


# ---------------------------------------------------------------- writing


def places_of(source: Source) -> tuple[Places, Places]:
    """Where the tensors of a converted model lie: those of the source's modules, and those of mixers."""
    found = tensor_places(source.shards)
    mixers = {name: place for name, place in found.items() if name.startswith(mixer_prefixes(source))}
    return {name: place for name, place in found.items() if name not in mixers}, mixers


def write_reconverted(folder: Path, source: Source, plan: Plan, natives: SourceClasses, seed: int) -> None:
    """Write the model of `source`, converted again by `plan`, into the empty `folder`: its weights and trained mixers
    with the bytes that they have, mixers that are added initialised.

    Raises LinearizeError (exit 6) for weights that are not those that linearize.json recorded.
    """
    old = read_json(source.folder / checkpoint.MANIFEST)
    before = checkpoint.recorded_hashes(old)
    own, mixers = places_of(source)
    added = tuple(f"{path}.mixer." for path in plan.reconversions[-1].added)  # also in place of another mechanism's
    mixers = {name: place for name, place in mixers.items() if not name.startswith(added)}
    files = [shard for shard in source.shards if any(place == shard for place, _ in own.values())]
    shards: checkpoint.Shards = {}
    hashes = checkpoint.no_hashes()
    for number, shard in enumerate(files, 1):
        name = checkpoint.SOURCE_SHARD.format(number, len(files))  # as for any source; transformers names its own so
        here = {tensor: entry for tensor, (place, entry) in own.items() if place == shard}
        shards[name] = list(here)
        written: dict[str, str] = {}
        if here.keys() == read_header(shard).keys():
            value = place_shard(shard, folder / name, plan.copy)
        else:  # transformers saved the model once, and its mixers are among the others
            value, written = "", write_shard(folder / name, here, lambda tensor: read_tensor(*own[tensor]))
        for kind, known in before.items():
            if shard.name in known["shards"] and value:
                hashes[kind]["shards"][name] = same(known["shards"][shard.name], value, shard)
            found = {tensor: known["tensors"][tensor] for tensor in here if tensor in known["tensors"]}
            hashes[kind]["tensors"] |= {n: same(v, written.get(n, v), shard) for n, v in found.items()}
    written = checkpoint.write_mixers(folder / checkpoint.MIXER_SHARD, plan, seed, mixers)
    for tensor in written.keys() & mixers.keys() & before["written"]["tensors"].keys():
        same(before["written"]["tensors"][tensor], written[tensor], mixers[tensor][0])
    shards[checkpoint.MIXER_SHARD] = list(written)
    hashes["written"]["tensors"] |= written
    checkpoint.write_index(folder, shards)
    copy_own(source.folder, folder)
    config, past = checkpoint.converted_config(source.config, plan, natives), checkpoint.past(source.folder)
    checkpoint.write_rest(folder, source, plan, code_files(plan, natives), hashes, config, **past)


def same(recorded: str, found: str, shard: Path) -> str:
    """The hash of what was copied from a shard. Raises LinearizeError (exit 6) where it is not the recorded one."""
    if recorded != found:
        message = f"{shard} has not the bytes that {checkpoint.MANIFEST} recorded. Download it, or train it, again"
        raise CheckFailedError(message)
    return found


def copy_own(source: Path, folder: Path) -> None:
    """Copy what goes along from the folder of a converted model, but for the code that linearize writes."""
    ours = {name for known in known_files().values() for name in known} | {MODELING_FILE}
    for path in carried_files(source):
        name = path.relative_to(source).as_posix()
        if name not in ours:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)


@contextlib.contextmanager
def as_source(source: Source, natives: SourceClasses) -> Iterator[Source]:
    """Within: a temporary folder that the source's own class loads, with the weights of the converted `source`."""
    own, _ = places_of(source)
    with scratch_folder() as folder:
        natives.source_config.save_pretrained(folder)
        for shard in source.shards:
            (folder / shard.name).symlink_to(shard.resolve())
        index = {"metadata": {}, "weight_map": {name: shard.name for name, (shard, _) in own.items()}}
        single = len(source.shards) == 1 and source.shards[0].name == "model.safetensors"
        if not single:  # which transformers loads whatever an index says
            checkpoint.write_json(folder / checkpoint.INDEX, index)
        yield dataclasses.replace(source, folder=folder)
