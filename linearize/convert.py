"""Convert, the story on one screen: open the source, probe, plan, check, write, verify."""

from __future__ import annotations

import copy
import dataclasses
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from .checkpoint.atomic import check_target, output_folder
from .checkpoint.carried import carried_files, left_behind
from .checkpoint.code import SourceClasses
from .checkpoint.fp8 import float_tensors
from .checkpoint.provenance import check_code_cache
from .checkpoint.reconvert import as_source, mixer_prefixes, plan_converted, write_reconverted
from .checkpoint.source import ADAPTER_CONFIG, DTYPES, Source, hub_kernel, open_source, present, read_header
from .checkpoint.write import meta_pickle, shard_dtype, write_checkpoint
from .errors import (
    IncompatibleError,
    LinearizeError,
    ResourceError,
    existing_folder,
    is_secret,
    leaves,
    reason_of,
    some,
)
from .estimate import break_even
from .export import formats
from .plan.keep import Choice, WindowChoice, auto_heads, heads_available, is_auto, regrouped, unscored_heads
from .plan.mechanisms import present_options, with_own_eps
from .plan.plan import Plan, Step, local_steps
from .plan.request import Request
from .probe.found import Found
from .probe.probe import found_in, model_class_of
from .probe.trace import quiet
from .serve.folder import for_engines
from .terminal.output import say, size
from .verify.reload import Level, verify

Say = Callable[[str], None]
# Chooses which layers of a plan, or which of the heads given, keep softmax, as many as asked for: choose/choose.py.
Chooser = Callable[..., Choice]
# Says what the window of a plan's kept layers costs, where the user named them: choose/choose.py.
Pricer = Callable[[Plan, Source, SourceClasses], Choice]
# Says which kept layers of a plan may keep their windows: choose/choose.py.
WindowChooser = Callable[[Plan, Source, SourceClasses, str, float], WindowChoice]
# What to write in place of `auto`.
NAMED = {"--keep-softmax": "layers, such as --keep-softmax 7,15", "--keep-heads": "heads, such as --keep-heads 3:0"}
# What only a source can be asked for: of a converted model that is said, not that the mechanism is missing.
OF_SOURCES = ("keep_softmax", "keep_heads", "kept_window")
UNREAD = "not copied, because loading the model does not need it: {}"

# Mechanisms that a preset of their own distils, of gdn the native layer alone; others take `hybrid`.
WINDOWS = "window", "hybrid-window"  # without and with layers that keep softmax
OWN_PRESETS = {"window": WINDOWS[1], "mamba2": "hybrid-native", "gdn": "hybrid-native-qwen3"}


def plan_conversion(
    model: str,
    mechanism: str | None,
    *,
    restore: str = "",
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
    choose: Chooser | None = None,
    price: Pricer | None = None,
    choose_windows: WindowChooser | None = None,
    **asked: Any,
) -> tuple[Plan, Source, SourceClasses]:
    """Decide everything and touch nothing. With `weights` False the shards need not be there.

    A model that is converted is converted again: `layers` of its softmax ones become linear (without `mechanism` as its
    linear ones are), and the layers `restore` get softmax back.

    `asked` are the other fields of a `Request`. Where its `keep_softmax` is `auto:2`, `choose` finds the layers, and
    then the heads of the others, where `keep_heads` is; without weights and `choose` a stand-in is planned
    (`Choice.unscored`). Where layers are named, `price` measures what their `kept_window` costs. Where that is
    `auto:4096`, `choose_windows` measures which of the kept layers get it; without it none does. Raises LinearizeError
    with the exit code of the obstacle.
    """
    if mechanism is not None:
        Request(mechanism, **asked)
    elif not (restore or any(map(asked.get, OF_SOURCES)) or asked.get("layers", "all") != "all"):
        raise LinearizeError(
            f"--to is missing: name the mechanism that {model} gets, such as --to gsa. Of a model that is converted "
            "already, name layers: --layers 3 or --restore 3"
        )
    source = open_source(model, revision, weights=weights)
    check_adapter(source)
    check_secrets(source)
    carried_files(source.folder)  # raises for links that lead elsewhere
    if source.converted:
        return plan_converted(source, mechanism, restore, weights=weights, trust_remote_code=trust_remote_code, **asked)
    if restore:
        raise LinearizeError(f"--restore {restore}: {source.name} has softmax everywhere; it is not converted")
    if mechanism is None:
        raise LinearizeError(f"--to is missing: name the mechanism that {source.name} gets, such as --to gsa")
    config = load_config(source, trust_remote_code)
    asked["options"] = with_own_eps(mechanism, asked.get("options") or {}, config)
    request = Request(mechanism, **asked)
    natives = SourceClasses(config, load_model_class(source, config, trust_remote_code))
    found = found_in(config, natives.head)  # first: it says what is wrong with a config
    facts: dict[str, Any] = {
        "architecture": natives.head.__name__,
        "model_type": natives.model_type,
        "stored": stored_dtype(source),
        "numbers": natives.parameters(),
        "pickled": source.pickled,
    }
    choice = heads = None
    if is_auto(request.keep_softmax):
        named = "" if is_auto(request.keep_heads) else request.keep_heads
        bare = dataclasses.replace(request, keep_softmax="", keep_heads=named, kept_window=None)
        whole = bare.plan(source, found, scored=True, **facts)
        check_scored(natives, "--keep-softmax")
        free = [step.site for step in whole.steps if not step.site.softmax_groups]
        layers = [site.layer for site in free]
        choice = Choice.unscored(request.keep_softmax, layers, len(whole.steps))  # raises for what cannot be asked for
        if is_auto(request.keep_heads):  # raises before layers are compared, whichever they will be
            most = sorted(free, key=lambda site: -len(heads_available([site], found)))[: len(free) - len(choice.kept)]
            auto_heads(request.keep_heads, heads_available(most, found))
        local: tuple[Step, ...] = ()
        window = request.window
        if window is not None:
            local = local_steps([*free, *whole.kept], window, found)
        if choose is not None:
            check_weights(source, natives)
            near = () if is_auto(request.kept_window) else local  # which have windows is measured afterwards
            choice = choose(whole, source, natives, request.keep_softmax, len(choice.kept), layers, near)
        request = dataclasses.replace(noted(request), keep_softmax=",".join(map(str, choice.kept)))
        kept = {site.path for site in (*whole.kept, *(one for one in free if one.layer in choice.kept))}
        if window is not None and kept.isdisjoint(step.site.path for step in local):
            say(f"note: --kept-window {request.kept_window}: layers {request.keep_softmax} have windows of their own")
            request = dataclasses.replace(request, kept_window=None)
    windows = None
    if is_auto(request.kept_window):
        request, windows = resolve_windows(noted(request), source, natives, found, facts, choose_windows)
    if is_auto(request.keep_heads):
        whole = dataclasses.replace(request, keep_heads="").plan(source, found, scored=True, **facts)
        groups = heads_available([step.site for step in whole.linear], found)
        request, text = noted(request), request.keep_heads
        heads = unscored_heads(text, groups)
        likely = dataclasses.replace(request, keep_heads=regrouped(heads.kept))
        likely.plan(source, found, **facts)  # raises for options under which no heads can keep softmax
        check_scored(natives, "--keep-heads")
        if choose is not None:
            check_weights(source, natives)
            heads = choose(whole, source, natives, text, len(heads.kept), groups)
        request = dataclasses.replace(request, keep_heads=regrouped(heads.kept))
    if weights and (((choice or heads) and choose is None) or (windows and choose_windows is None)):
        raise TypeError("auto needs `choose` and `choose_windows`, such as those of linearize.choose.choose.choosers")
    plan = request.plan(source, found, **facts)
    if price is not None and choice is None and windows is None and plan.local:
        if writes_no_text(natives):
            message = f"--score-text: {plan.architecture} writes no text, so there is no cost to measure. Leave it out"
            raise IncompatibleError(message)
        check_weights(source, natives)
        choice = price(plan, source, natives)
    if why := no_format(plan, natives.source_config):
        say(f"note: {mechanism} is for linearize export --as auto, which would refuse this: {why}")
    return dataclasses.replace(plan, choice=choice, heads_choice=heads, window_choice=windows), source, natives


def no_format(plan: Plan, config: Any) -> str:
    """Why no format of engines holds what a plan makes with a layer that is there for them; empty where one does, and
    for other layers."""
    spec = plan.spec()
    if not any(map(for_engines, spec["layers"])):
        return ""
    converted = copy.deepcopy(config)
    converted.linearize = spec
    try:
        formats.choose("auto", converted, plan.source)
    except LinearizeError as error:
        return str(error)
    return ""


def resolve_windows(
    request: Request,
    source: Source,
    natives: SourceClasses,
    found: Found,
    facts: dict[str, Any],
    choose_windows: WindowChooser | None,
) -> tuple[Request, WindowChoice]:
    """The request with the layers named whose softmax gets the window that `kept_window` leaves open, and why these:
    none where it is not measured.

    Raises LinearizeError: 3 for a model without predictions to compare, and as planning and measuring do.
    """
    asked, window = str(request.kept_window), request.window
    assert window is not None
    assert window.limit is not None
    heads = "" if is_auto(request.keep_heads) else request.keep_heads
    whole = dataclasses.replace(request, keep_heads=heads)
    every = whole.plan(source, found, every_window=True, **facts)
    if writes_no_text(natives):
        message = f"compares predictions of text, and {every.architecture} writes none"
        raise IncompatibleError(
            f"--kept-window {asked} {message}. Give every kept layer one: --kept-window {window.tokens}"
        )
    windows = WindowChoice(asked, window.limit, lacking="nothing was measured yet")
    if choose_windows is not None:
        check_weights(source, natives)
        windows = choose_windows(every, source, natives, asked, window.limit)
    near = f"{window.tokens}@{','.join(map(str, windows.near))}" if windows.near else None
    return dataclasses.replace(request, kept_window=near), windows


def noted(request: Request) -> Request:
    """A request that was planned once, which told old names of options: with present ones, not to tell them again."""
    return dataclasses.replace(request, options=present_options(request.mechanism, request.options or {}))


def writes_no_text(natives: SourceClasses) -> bool:
    """Whether a model has no predictions of the next token to compare."""
    model = natives.meta
    return bool(model.main_input_name == "pixel_values" or not model.can_generate() or model.config.is_encoder_decoder)


def check_scored(natives: SourceClasses, flag: str) -> None:
    """Raise LinearizeError (exit 3) where `auto` has no data to compare predictions on."""
    from .data.kinds import check_trains, kind_of

    try:
        check_trains(natives.meta, kind_of(natives.meta))
    except IncompatibleError as error:
        message = f"{flag} auto compares predictions: {error.message.partition('. ')[0]}. Name the {NAMED[flag]}"
        raise IncompatibleError(message) from error


def convert(
    plan: Plan,
    source: Source,
    natives: SourceClasses,
    output: Path,
    *,
    overwrite: bool = False,
    level: Level = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
    say: Say = print,
) -> str:
    """Carry a plan out: write to a temporary folder, verify there, rename to `output`. Returns what was verified."""
    with present():
        check_paths(source, output, overwrite)
        check_weights(source, natives)
        check_disk(plan, source, output)
    with output_folder(output, overwrite) as folder:
        if source.converted:
            write_reconverted(folder, source, plan, natives, seed)
            with as_source(source, natives) as before:
                message = verify(folder, level, before, plan, trust_remote_code)
        else:
            write_checkpoint(folder, source, plan, natives, seed)
            message = verify(folder, level, source, plan, trust_remote_code)
    say(message)
    return message


def preset_for(plan: Plan) -> str:
    """The preset whose stages suit the layers of a model that writes text."""
    kinds = {step.mechanism if step.mechanism != "gdn" or step.options.get("native") else "" for step in plan.steps}
    if kinds == {"window"} and not plan.softmax_layers:
        return WINDOWS[0]
    return OWN_PRESETS.get(kinds.pop(), "hybrid") if len(kinds) == 1 else "hybrid"


def next_step(plan: Plan, folder: Path, natives: SourceClasses, told: Sequence[str] = ()) -> str:
    """How to go on with the conversion in `folder`, also with one's own data; `told` is the recipe that it was
    converted by, if any, and the values given with it."""
    from .checkpoint.card import loading
    from .recipe.recipe import load_recipe

    of_images = loading(plan)["processor"] == "image_processor"
    suited, causal = preset_for(plan), plan.linear[0].site.causal
    # Presets train new parameters first, but for those of windows, which have none.
    if causal and not (plan.new_parameters or of_images or suited in WINDOWS):
        return shlex.join(["linearize", "generate", str(folder), "Once upon a time"])
    if not (of_images or is_trained(plan.architecture, natives)):
        own = "train its mixers in a loop of your own, they are ordinary parameters"
        return f"{own}: finetune has no data for {plan.architecture}"
    headless = plan.architecture.removesuffix("WithProjection").endswith(("Model", "Backbone"))
    encoder = headless and not (of_images or causal)
    recipe, key, end = ("vit-la", "images", "") if of_images else (suited, "files", ".txt")
    recipe = "sentence" if encoder else recipe
    preset, recipe = recipe, told[0] if told else recipe
    given = [value for value in told[1:] if not value.startswith(("convert", "model.base="))]
    command = shlex.join(["linearize", "finetune", recipe, *given, f"model.base={folder}", "convert=null"])
    if given or recipe != preset:  # its stages and data may be others
        return f"distil it: {command}\n--dry-run tells the time."
    command += " stages.logit_kl.kind=feature_cosine" if of_images and headless else ""
    # Without the first token a window begins far from its teacher, unlike those of the presets.
    if causal and suited in WINDOWS and not all(step.options["sink"] for step in plan.steps):
        command += " stages.logit_kl.optimizer.lr=1e-4"
    own = f"'data.train={{{key}: A{end}}}' 'data.eval={{{key}: B{end}}}'"
    files = "" if of_images else ", A.txt or A.jsonl with the field text,"
    less = ""
    if not (of_images or encoder):
        text = natives.source_config.get_text_config(decoder=True)
        row = min(1024, getattr(text, "max_position_embeddings", None) or 1024)
        row -= row % 64 if row > 64 else 0  # RoBERTa's count has two that are no token's
        stages = load_recipe(recipe, [f"model.base={folder}", "convert=null"]).stages
        less = f" For a first try on a CPU add data.pack.seq_len={row}"
        less += "".join(f" stages.{stage.name}.tokens=1M" for stage in stages)
        less += "".join(f" stages.{s.name}.data.pack.seq_len={row}" for s in stages if s.data.pack.seq_len)
    return (
        f"distil it: {command}\n--dry-run tells the time.{less}\n"
        f"The recipe's data are on the Hub; for your own{files} add {own}"
    )


def is_trained(architecture: str, natives: SourceClasses) -> bool:
    """Whether finetune trains a model that reads no images: one text, of which it predicts tokens or makes vectors."""
    one_text = natives.head.main_input_name == "input_ids" and not natives.source_config.is_encoder_decoder
    labelled = ("Classification", "QuestionAnswering", "MultipleChoice", "Prediction")
    return one_text and not architecture.endswith(labelled)


def slower(plan: Plan, source: Source, natives: SourceClasses) -> str:
    """A note where softmax reads the model's inputs faster than the plan's layers do; empty where it does not."""
    return break_even.slower(plan, natives.source_config, source.folder)


def unread(source: Source, *_: Any) -> list[str]:
    """What of the source's folder does not go along into the result, since loading a model reads none of it."""
    return left_behind(source.folder, source.shards)


def load_config(source: Source, trust_remote_code: bool) -> PretrainedConfig:
    """The source's config object. Raises LinearizeError (exit 3) for code and wrong values."""
    if source.config.get("auto_map") and not trust_remote_code:
        files = ", ".join(sorted(f.name for f in source.folder.glob("*.py"))) or "its auto_map"
        raise own_code(source, files)
    kernel = hub_kernel(source.config)
    if kernel and not trust_remote_code:
        raise own_code(source, f"{kernel} in config.json names a kernel of the Hub", "runs")
    try:
        with quiet():
            config = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
        if source.block is not None:
            del config.quantization_config
        return config
    except Exception as error:  # validators of many architectures raise as they like
        if trust_remote_code and isinstance(error, OSError):
            check_code_cache()
        path = source.folder / "config.json"
        raise IncompatibleError(f"{path} cannot be used: {reason_of(error)}") from error


def own_code(source: Source, files: str, how: str = "ships") -> LinearizeError:
    """The error for a source that ships, or runs, code that is not trusted."""
    pin = f" --revision {source.revision}" if source.revision else ""
    return IncompatibleError(f"{source.name} {how} its own code ({files}). Read it, then pass --trust-remote-code{pin}")


def check_adapter(source: Source) -> None:
    """Raise LinearizeError (exit 3) for a source with a PEFT adapter, without which it is another model."""
    path = source.folder / ADAPTER_CONFIG
    if path.exists():
        raise IncompatibleError(
            f"{path}: {source.name} is a base and an adapter. Merge the adapter first (peft: merge_and_unload, then "
            "save_pretrained), and convert what that saves"
        )


def check_secrets(source: Source) -> None:
    """Raise LinearizeError (exit 3) for an access token in config.json, which would go along: the file is copied."""
    for keys, value in leaves(source.config):
        if isinstance(value, str) and is_secret(value):
            key = ".".join(map(str, keys))
            raise IncompatibleError(
                f"{source.folder / 'config.json'}: {key} holds an access token or a password, which the result would "
                "carry. Take it out, and revoke it"
            )


def load_model_class(source: Source, config: PretrainedConfig, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The native class with a head, from transformers or from the code that the source carries."""
    entries = getattr(config, "auto_map", None)
    reference = entries.get("AutoModelForCausalLM") if isinstance(entries, dict) else None
    if not (reference and trust_remote_code):
        return model_class_of(config)
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    check_code_cache()
    try:
        return get_class_from_dynamic_module(reference, str(source.folder))
    except Exception as error:  # whatever that code raises
        raise IncompatibleError(f"{source.name}: its own {reference} cannot be loaded: {reason_of(error)}") from error


def stored_dtype(source: Source) -> str:
    """The dtype that the source declares, else the one most of its tensors have."""
    declared = source.config.get("dtype") or source.config.get("torch_dtype")
    headers = [] if source.pickled or declared in DTYPES.values() else [read_header(s) for s in source.shards]
    return shard_dtype(headers, declared)


def check_paths(source: Source, output: Path, overwrite: bool) -> None:
    """`check_target`, and the names of both folders."""
    for path in (Path(os.path.realpath(source.folder)), Path(os.path.realpath(output))):
        if os.fsencode(path).decode("utf-8", "replace") != str(path):
            raise IncompatibleError(f"{path} is not valid UTF-8, and safetensors opens no such path. Rename it")
    check_target(source.folder, output, overwrite)


def check_weights(source: Source, natives: SourceClasses) -> None:
    """Load the source onto the meta device: raises LinearizeError (exit 3) when config and weights disagree."""
    weights: dict[str, torch.Tensor] = {} if source.pickled else float_tensors(source)
    for shard in source.shards if source.pickled else ():
        weights |= meta_pickle(shard)
    if source.converted:
        weights = {name: value for name, value in weights.items() if not name.startswith(mixer_prefixes(source))}
    try:
        with quiet():
            # Not the folder: even onto the meta device, transformers would read every weight in it.
            model, report = natives.head.from_pretrained(
                None,
                config=natives.source_config,
                state_dict=weights,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # loaders of many architectures raise as they like
        raise disagree(source.name, f"{natives.head.__name__} cannot load them ({reason_of(error)})") from error
    if report["mismatched_keys"]:
        name, found, expected = min(report["mismatched_keys"])
        raise disagree(source.name, f"{name} is {list(found)}, the config asks for {list(expected)}")
    for kind in ("missing", "unexpected"):
        names = sorted(map(str, report[f"{kind}_keys"]))
        if names:
            # An encoder may come without a pooler, which its class makes and its users do not read.
            more = ", or, if nothing reads them, load and save it there with transformers, which adds random ones"
            raise disagree(source.name, f"{kind} {some(names)}", more if kind == "missing" else "")
    for name, parameter in model.named_parameters():
        if name in weights and parameter.is_floating_point() and not weights[name].is_floating_point():
            dtype = str(weights[name].dtype).removeprefix("torch.")
            message = f"{source.name}: {name} holds {dtype}: surgery needs float weights; use the model's float version"
            raise IncompatibleError(message)


def disagree(what: object, how: str, more: str = "") -> LinearizeError:
    """The error for a folder whose config and weights are not of one revision; `more` is another remedy."""
    todo = f"Download both from one revision{more}"
    return IncompatibleError(f"config.json and the weights of {what} disagree: {how}. {todo}")


def check_disk(plan: Plan, source: Source, output: Path) -> None:
    """Refuse to start (exit 4) when the disk of `output` cannot hold what will be written."""
    parent = existing_folder(output.absolute().parent)
    linked = plan.copy or parent.stat().st_dev == source.folder.stat().st_dev  # the plan counts copies
    need = plan.needed_bytes + (0 if linked or plan.cast or source.pickled else source.bytes)
    free = shutil.disk_usage(parent).free
    if need > free:
        raise ResourceError(f"need {size(need)} in {parent}, {size(free)} free. Make room, or choose another -o")
