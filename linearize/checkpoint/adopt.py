"""Take back a model that transformers, Trainer or TRL saved: `save_pretrained` keeps the code and the plan of a
linearized model, and leaves out linearize.json, which says what is whose in the folder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from linearize_kernels.hf.attention_hooks import TRAINED

from ..errors import MALFORMED, IncompatibleError, LinearizeError
from ..plan.mechanisms import build_mixer
from ..plan.plan import Plan, Step, grouped, item_bytes
from ..probe.probe import probe
from . import write as checkpoint
from .atomic import output_folder, scratch_beside
from .code import SourceClasses, code_files
from .manifest import plan_of_resaved
from .provenance import check_code, natives_of, usable
from .shards import link_or_copy
from .source import Source, open_source, read_header

# Of config.json what a linearized model adds to its source's.
ADDED = ("auto_map", "linearize", "architectures", "model_type", "transformers_weights", "transformers_version")
UNNAMED = "other layers keep the attention that they had"


def adopt(folder: Path, output: Path, *, trust_remote_code: bool = False) -> Plan:
    """Write `output`: the model in `folder`, its weights linked where possible, with this version's code, an index, a
    card and linearize.json. The folder itself stays as it is.

    Its weights count as trained, since somebody saved it anew. Raises LinearizeError: 2 for an output that is in the
    way, 3 for a folder that holds no whole linearized model, and for other code than linearize writes unless
    `trust_remote_code`.
    """
    known = check_code(folder, trust_remote_code)
    source = open_source(str(folder), None)
    if source.pickled:
        message = f"{folder} has pickled weights. Save the model with safetensors, which save_pretrained does by itself"
        raise IncompatibleError(message)
    natives = natives_of(known)
    plan = whole_plan(known, source, natives)
    with output_folder(output, overwrite=None) as target:
        for shard in source.shards:
            link_or_copy(shard, target / shard.name)
        checkpoint.write_index(target, {shard.name: list(read_header(shard)) for shard in source.shards})
        checkpoint.copy_carried(folder, target)
        config = checkpoint.converted_config(source.config, plan, natives) | {TRAINED: True}
        checkpoint.write_rest(target, source, plan, code_files(plan, natives), checkpoint.no_hashes(), config)
    return plan


def whole_plan(known: Plan, source: Source, natives: SourceClasses) -> Plan:
    """The plan of a config, with what it does not hold: names, sizes, and the layers that keep softmax."""
    item = item_bytes(known.dtype)
    steps = tuple(sized(step, item) for step in known.steps)
    rest: dict[str, Any] = {}
    if not source.config["linearize"]["all_linear"]:
        rest["others"] = (UNNAMED,)
        with contextlib.suppress(LinearizeError, *MALFORMED):
            found = probe(native_config(source, known), natives.head)
            converted = {step.site.path for step in steps}
            kept = tuple(site for site in found.sites if site.path not in converted)
            rest |= {"kept": kept, "reads_masks": found.reads_masks, "cached_tokens": found.cached_tokens}
            if kept or found.reads_masks or found.others:
                rest["others"] = grouped(found.others)
    return dataclasses.replace(
        known, source=source.folder.resolve().name, steps=steps, source_bytes=source.bytes, **rest
    )


def sized(step: Step, item: int) -> Step:
    """A step with its number of parameters and bytes of state."""
    with torch.device("meta"):
        mixer = build_mixer(step.mechanism, step.site, step.options)
    state = mixer.state_bytes(0, item) if step.site.causal else 0
    return dataclasses.replace(step, new_parameters=sum(p.numel() for p in mixer.parameters()), state_bytes=state)


def native_config(source: Source, plan: Plan) -> Any:
    """The source's config object, out of the linearized config.json. Raises LinearizeError (exit 3) for values that it
    refuses."""
    rest = {name: plain(value) for name, value in source.config.items() if name not in ADDED}
    with usable(source.folder):
        return AutoConfig.for_model(plan.model_type, **rest, architectures=[plan.architecture])


def plain(value: Any) -> Any:
    """A value of a linearized config.json as the source had it: parts of it do not refuse its classes."""
    if not isinstance(value, dict):
        return value
    return {name: plain(item) for name, item in value.items() if name != "transformers_weights"}


@contextlib.contextmanager
def adopted(folder: Path, *, trust_remote_code: bool = False) -> Iterator[Path]:
    """Within: `folder`, or, where transformers saved it, a temporary folder beside it with the same model, whole."""
    if not folder.is_dir() or plan_of_resaved(folder) is None:
        yield folder
        return
    with scratch_beside(folder.resolve()) as scratch:
        whole = scratch / folder.resolve().name
        adopt(folder, whole, trust_remote_code=trust_remote_code)
        yield whole
