"""Convert again what is converted: softmax layers become linear, linear ones get softmax back or another mechanism.
First it is decided, of values; then what is there is read and the result written. Trained weights stay as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckFailedError, IncompatibleError, LinearizeError, undamaged
from ..plan.dropped_features import check_dropped_features
from ..plan.keep import is_auto, keep_heads
from ..plan.mechanisms import with_own_eps
from ..plan.plan import (
    Pass,
    Plan,
    check_rotation,
    check_unused_options,
    grouped,
    item_bytes,
    layer_set,
    make_steps,
    mismatch,
    resolve_rotation,
)
from ..plan.request import Request
from ..probe.found import Found
from ..probe.probe import found_in
from ..terminal.output import layers_named, ranges
from ..verify.reload import scratch_folder
from . import write as checkpoint
from .adopt import native_config
from .carried import carried_files, check_carried
from .code import MODELING_FILE, SourceClasses, code_files
from .known_code import known_files
from .provenance import (
    check_code,
    check_merged,
    check_mixers,
    natives_of,
    read_plan,
    untrained_mixers,
    with_present_options,
)
from .shards import place_shard, read_tensor, write_shard
from .source import Places, Source, read_header, read_json, tensor_places


def same_mechanism(old: Plan, options: dict[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    """Mechanism and options of new linear layers where none is named: those of the linear ones of `old`, and `options`.

    Raises LinearizeError (exit 2) where its layers are not all alike.
    """
    kinds = {step.mechanism for step in old.linear}
    if len(kinds) > 1:
        raise LinearizeError(
            f"{name} has layers of {' and '.join(sorted(kinds))}. Say which the new ones become: --to {min(kinds)}"
        )
    options_of = [step.options for step in old.linear]
    # What rope=auto became beside heads with softmax, and elsewhere.
    places = [("after", "before")[bool(step.site.softmax_groups)] for step in old.linear]
    if len(set(places)) > 1 and [one.get("rope") for one in options_of] == places:
        options_of = [one | {"rope": "auto"} for one in options_of]
    first = old.linear[0]
    if any(one != options_of[0] for one in options_of):
        raise LinearizeError(
            f"the {first.mechanism} layers of {name} have several options. Say which the new ones have: "
            f"--to {first.mechanism} --set key=value"
        )
    return first.mechanism, options_of[0] | options


def check_unused(mechanism: str | None, options: dict[str, Any], restore: str) -> None:
    """Raise LinearizeError (exit 2) for a mechanism or options beside `restore`, where no layer becomes linear."""
    if restore and (mechanism is not None or options):
        given = f"--to {mechanism}" if mechanism is not None else f"--set {next(iter(options))}"
        raise LinearizeError(
            f"{given} says what layers become, and --restore {restore} alone makes none linear. Leave it out, or name "
            "some with --layers"
        )


def plan_reconversion(
    request: Request,
    restore: str,
    given: dict[str, Any],
    old: Plan,
    found: Found,
    folder: str,
    untrained: set[str],
    recipe: dict[str, Any] | None,
) -> Plan:
    """The plan of a model in `folder`, converted by `old`, whose source has the attention `found`: `request.layers`
    become linear, and the layers `restore` get softmax back.

    `given` are the options that a person gave; `untrained` and `recipe` are as in `Pass`. Raises LinearizeError: 2
    for layers that are what they shall become, 3 for what does not fit.
    """
    check_request(request, restore, old, found, folder)
    mixers = {step.site.path: step for step in old.steps}
    linear = {step.site.path for step in old.linear}  # softmax over a window can become linear, and softmax over all
    back = chosen(restore, "--restore", found, folder, lambda path: path in mixers, "softmax")
    layers = "" if request.layers == "all" else request.layers
    alike = {
        path
        for path in linear
        if mixers[path].mechanism == request.mechanism
        and all(mixers[path].options.get(name) == value for name, value in given.items())
    }
    new = chosen(layers, "--layers", found, folder, lambda path: path not in alike, "linear")
    sites = []
    for layer in sorted(new):  # of two towers one may have no place for the mechanism
        here = [site for site in found.sites if site.layer == layer and site.path not in alike]
        sites += [site for site in here if not mismatch(site, request.mechanism)] or here
    check_dropped_features(sites, request.allow_drop)
    sites = keep_heads(request.keep_heads, sites, found, folder)
    steps = resolve_rotation(found, make_steps(sites, request.mechanism, request.options or {}, item_bytes(old.dtype)))
    check_rotation(found, steps)
    check_unused_options(found, steps, given)
    restored = [path for path, step in mixers.items() if step.site.layer in back]
    stay = {path: step for path, step in mixers.items() if path not in restored}
    known = stay | {step.site.path: step for step in steps}
    if not linear - {*restored} and not steps:
        raise LinearizeError(
            f"--restore {restore} leaves no linear layer in {folder}, and softmax everywhere is the model that it was "
            f"converted from: use {old.source}"
        )
    order = [site.path for site in found.sites]
    untrained = {path for path in untrained if path in stay} | {step.site.path for step in steps}
    done = Pass(folder, tuple(s.site.path for s in steps), tuple(restored), tuple(sorted(untrained)), recipe)
    numbers = sum(step.new_parameters for step in known.values())
    return dataclasses.replace(
        old,
        cast=False,
        pickled=False,
        steps=tuple(known[path] for path in order if path in known),
        kept=tuple(site for site in found.sites if site.path not in known),
        others=grouped(found.others),
        reads_masks=found.reads_masks,
        cached_tokens=found.cached_tokens,
        needed_bytes=numbers * item_bytes(old.dtype) + old.source_bytes * request.copy,
        copy=request.copy,
        choice=None,
        heads_choice=None,
        window_choice=None,
        reconversions=(*old.reconversions, done),
    )


def check_request(request: Request, restore: str, old: Plan, found: Found, folder: str) -> None:
    """Raise LinearizeError (exit 2) for what means nothing for a converted model, and where no layer is named."""
    if request.keep_softmax:
        how = "compares layers of a source" if is_auto(request.keep_softmax) else "is for a source"
        raise LinearizeError(
            f"--keep-softmax {request.keep_softmax} {how}, and {folder} is converted already. Name the layers that "
            "become linear (--layers 3), and those that get softmax back (--restore 3). A recipe trains it as it is "
            "with convert=null"
        )
    if is_auto(request.keep_heads):
        raise LinearizeError(
            f"--keep-heads {request.keep_heads} compares heads of a source, and {folder} is converted already. Name "
            "those of the layers that become linear: --layers 3 --keep-heads 3:0. A recipe trains it as it is with "
            "convert=null"
        )
    if request.keep_heads and request.layers == "all":
        raise LinearizeError(
            f"--keep-heads {request.keep_heads} is for layers that become linear, and none does: linear layers of "
            f"{folder} stay as they are. Give a layer softmax back (--restore 3), then convert it with its heads"
        )
    if request.kept_window is not None:
        raise LinearizeError(
            f"--kept-window {request.kept_window} is for a source, and {folder} is converted already. Convert "
            f"{old.source} with it"
        )
    if request.dtype not in ("keep", old.dtype):
        raise LinearizeError(
            f"--dtype {request.dtype}: {folder} is {old.dtype}, and its trained weights stay as they are. Leave it out "
            "(in a recipe: model.dtype=null)"
        )
    if request.layers == "all" and not restore:
        paths = {step.site.path for step in old.linear}
        kinds = " and ".join(sorted({repr(step.mechanism) for step in old.linear}))
        left = [site.layer for site in found.sites if site.path not in paths]
        more = f"become linear (--layers {ranges(left)} for all that have softmax), or which " if left else ""
        raise IncompatibleError(
            f"{folder} has {kinds} in {layers_named(step.site.layer for step in old.linear)} already. To train it, "
            "use linearize finetune with convert=null. To convert it again, name the layers that "
            f"{more}get softmax back (--restore 3), or which become another mechanism (--layers 3 --to NAME)"
        )


def chosen(text: str, flag: str, found: Found, folder: str, fits: Callable[[str], bool], otherwise: str) -> set[int]:
    """The layers that `flag` names. Raises LinearizeError (exit 2) for one without a module that `fits`."""
    asked = layer_set(text, flag, found, folder)
    there = {site.layer for site in found.sites if fits(site.path)}
    wrong = sorted(asked - there)
    if wrong:
        instead = f"Choose among layers {ranges(sorted(there))}" if there else "No layer is left to choose"
        one = "layer {} is" if len(wrong) == 1 else "layers {} are"
        raise LinearizeError(f"{flag} {text}: {one.format(ranges(wrong))} {otherwise} in {folder} already. {instead}")
    return asked


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
    check_merged(folder, source.name)
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
