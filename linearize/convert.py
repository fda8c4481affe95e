"""Convert, the story in one screen: open the source, probe, plan, check, write, verify."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from .checkpoint import check_output, output_folder, shard_dtype, write_checkpoint
from .errors import Exit, LinearizeError
from .plan import Plan, choose_layers, make_steps, ranges
from .probe import model_class_of, probe, quiet
from .render import Natives
from .source import DTYPES, Source, open_source, read_header
from .verify import Level, verify

Say = Callable[[str], None]


def plan_conversion(
    model: str,
    mechanism: str,
    *,
    layers: str = "all",
    keep_softmax: str = "",
    options: dict[str, Any] | None = None,
    dtype: str = "keep",
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> tuple[Plan, Source, Natives]:
    """Decide everything and touch nothing. With `weights` False the shards need not be there.

    Raises LinearizeError with the exit code of the obstacle.
    """
    if dtype not in ("keep", *DTYPES.values()):
        raise LinearizeError(f"--dtype {dtype}: choose keep, {', '.join(DTYPES.values())}")
    make_steps([], mechanism, options or {})  # names and options first: they need no model
    source = open_source(model, revision, weights=weights)
    config = load_config(source, trust_remote_code)
    natives = Natives(config, load_model_class(source, config, trust_remote_code))
    sites = probe(config, natives.head)
    chosen, kept = choose_layers(sites, layers, keep_softmax)
    steps = make_steps(chosen, mechanism, options or {})
    stored = stored_dtype(source)
    target = stored if dtype == "keep" else dtype
    mixer_bytes = sum(s.new_parameters for s in steps) * {"float64": 8, "float32": 4}.get(target, 2)
    rewritten = source.bytes if source.pickled or target != stored else 0
    plan = Plan(
        source=source.name,
        revision=source.revision,
        architecture=natives.head.__name__,
        model_type=natives.model_type,
        dtype=target,
        cast=target != stored,
        steps=steps,
        kept=tuple(kept),
        source_bytes=source.bytes,
        needed_bytes=mixer_bytes + rewritten,
    )
    return plan, source, natives


def convert(plan: Plan, source: Source, natives: Natives, output: Path, *, overwrite: bool = False,
            level: Level = "auto", trust_remote_code: bool = False, seed: int = 0, say: Say = print) -> str:  # fmt: skip
    """Carry a plan out: write to a temporary folder, verify there, rename to `output`. Returns what was verified."""
    check_paths(source, output, overwrite)
    check_weights(source, natives)
    check_disk(plan, source, output)
    with output_folder(output, overwrite) as folder:
        write_checkpoint(folder, source, plan, natives, seed)
        said = verify(folder, level, source, plan.spec(), natives.head.__name__, trust_remote_code)
    say(said)
    return said


def load_config(source: Source, trust_remote_code: bool) -> PretrainedConfig:
    """The source's config object. Raises LinearizeError (exit 3) for code, converted models and wrong values."""
    spec, model_type = source.config.get("linearize"), source.config["model_type"]
    if model_type.startswith("linearized_") and isinstance(spec, dict):
        layers = spec.get("layers", [])
        done = sorted({layer["mechanism"] for layer in layers})
        raise LinearizeError(
            f"layers {ranges([layer['site']['layer'] for layer in layers])} are already {', '.join(map(repr, done))}. "
            "Continue with linearize finetune, or convert the source model anew with other --layers",
            Exit.INCOMPATIBLE,
        )
    if source.config.get("auto_map") and not trust_remote_code:
        files = ", ".join(sorted(f.name for f in source.folder.glob("*.py"))) or "its auto_map"
        pin = f" --revision {source.revision}" if source.revision else ""
        raise LinearizeError(
            f"{source.name} ships its own code ({files}). Read it, then pass --trust-remote-code{pin}", Exit.INCOMPATIBLE
        )
    try:
        with quiet():
            return AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # validators of many architectures raise as they like
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LinearizeError(f"{source.folder / 'config.json'} cannot be used: {reason}", Exit.INCOMPATIBLE) from error


def load_model_class(source: Source, config: PretrainedConfig, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The native class with a head, from transformers or from the code that the source carries."""
    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(reference, str(source.folder))
    return model_class_of(config)


def stored_dtype(source: Source) -> str:
    """The dtype that the source declares, else the one most of its tensors have."""
    declared = source.config.get("dtype") or source.config.get("torch_dtype")
    headers = [] if source.pickled or declared in DTYPES.values() else [read_header(s) for s in source.shards]
    return shard_dtype(headers, declared)


def check_paths(source: Source, output: Path, overwrite: bool) -> None:
    """Refuse an output that is the source, inside it, or around it, and one that is not empty (exit 2)."""
    a, b = source.folder.resolve(), output.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise LinearizeError(f"-o {output} and the source {source.folder} must be separate folders")
    check_output(output, overwrite)


def check_weights(source: Source, natives: Natives) -> None:
    """Load the source onto the meta device: raises LinearizeError (exit 3) when config and weights disagree."""
    if source.pickled:
        return  # read once, when it is rewritten; the finished folder is checked all the same
    for shard in source.shards:
        read_header(shard)
    with quiet():
        _, report = natives.head.from_pretrained(source.folder, device_map={"": "meta"}, output_loading_info=True)
    wrong = [(kind, sorted(map(str, report[kind]))) for kind in ("missing_keys", "mismatched_keys") if report[kind]]
    for kind, names in wrong:
        raise LinearizeError(
            f"config.json and the weights of {source.name} disagree: {kind.replace('_', ' ')} {', '.join(names[:3])}"
            f"{' ...' if len(names) > 3 else ''}. Download both from one revision",
            Exit.INCOMPATIBLE,
        )


def check_disk(plan: Plan, source: Source, output: Path) -> None:
    """Refuse to start (exit 4) when the disk of `output` cannot hold what will be written."""
    parent = next(p for p in output.absolute().parents if p.exists())
    linked = parent.stat().st_dev == source.folder.stat().st_dev
    need = plan.needed_bytes + (0 if linked or plan.cast or source.pickled else source.bytes)
    free = shutil.disk_usage(parent).free
    if need > free:
        raise LinearizeError(f"need {need / 2**30:.1f} GiB in {parent}, {free / 2**30:.1f} free", Exit.RESOURCE)
