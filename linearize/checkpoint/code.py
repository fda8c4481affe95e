"""Render the code of a checkpoint: modeling_linearized.py, and the kernel files that it imports."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import transformers

from .. import __version__
from ..plan.mechanisms import MIXER_CLASS, parts_of
from ..plan.plan import Plan
from ..probe.trace import build_on_meta
from .flatten import flat_files, imported, reached
from .templates import templates_of, written

MODELING_FILE = "modeling_linearized.py"
IMAGE_TEXT = "AutoModelForImageTextToText"

# Files that travelled under another name until 0.3.0 was released: that name, and what a model's file imports of it.
EARLIER = {
    "attention_hooks": ("seam", "Linearized"),
    "static_layers": ("rooms", "Rooms"),
    "learned_maps": ("hedgehog", "hedgehog"),
}


# Heads that are trained anew on a model of text, by the Auto classes that load them: rewards are of the first.
TASKS = ("AutoModelForSequenceClassification", "AutoModelForTokenClassification", "AutoModelForQuestionAnswering")


class SourceClasses:
    """The source's own classes: its config, its model with a head, its bare model where there is one, and `tasks`:
    other heads that transformers has for that, by their Auto class; none of them `with_tasks` False."""

    def __init__(self, config: Any, model_class: Any, with_tasks: bool = True) -> None:
        self.config: Any = type(config)
        self.source_config = config
        self.model_type: str = config.model_type
        self.models: list[Any] = [model_class]
        bare = transformers.AutoModel._model_mapping.get(type(config), None)
        if isinstance(bare, type) and bare is not model_class:
            self.models.insert(0, bare)
        self.tasks: dict[str, Any] = {}
        if with_tasks and len(self.models) > 1 and not config.is_encoder_decoder:
            for name in TASKS:
                found = getattr(transformers, name)._model_mapping.get(type(config), None)
                # Where the bare model is called otherwise, keys of the checkpoint would not be found.
                if found not in (None, *self.models) and found.base_model_prefix == model_class.base_model_prefix:
                    self.tasks[name] = found

    @property
    def without_tasks(self) -> SourceClasses:
        """The same as the first folders of 0.3.0 had them."""
        return SourceClasses(self.source_config, self.head, with_tasks=False)

    @property
    def written(self) -> list[Any]:
        """All that a checkpoint has a class for."""
        return [*self.models, *dict.fromkeys(self.tasks.values())]

    @property
    def head(self) -> Any:
        """The model class that the checkpoint is for."""
        return self.models[-1]

    @functools.cached_property
    def meta(self) -> Any:
        """The source model without memory behind its weights."""
        return build_on_meta(self.source_config, self.head)

    def tied(self) -> set[str]:
        """Names of parameters that share another's memory, such as an output embedding."""
        return set(self.meta.all_tied_weights_keys)

    def parameters(self) -> int:
        """How many parameters the source has, shared ones counted once."""
        return sum(p.numel() for p in self.meta.parameters())


def auto_map(natives: SourceClasses) -> dict[str, str]:
    """`auto_map` of config.json: which rendered class serves which Auto class."""
    config, head = natives.config.__name__, natives.head.__name__
    entries = {"AutoConfig": config, **dict.fromkeys(auto_names(natives.config, natives.head), head)}
    if len(natives.models) > 1:
        entries.setdefault("AutoModel", natives.models[0].__name__)
    for name, task in natives.tasks.items():
        entries.setdefault(name, task.__name__)
    return {name: f"modeling_linearized.Linearized{own}" for name, own in entries.items()}


@functools.lru_cache(64)
def auto_names(config: Any, head: Any) -> Sequence[str]:
    """The Auto classes that load this class: for text that goes on the causal one, and behind it that of images with
    text, else all those for a task, and AutoModel where there is none. Kept: transformers looks through all its models
    for each Auto class."""
    serving = []
    for name, auto in vars(transformers.models.auto.modeling_auto).items():
        found = getattr(auto, "_model_mapping", {}).get(config, ()) if name.startswith("AutoModel") else ()
        if head in (found if isinstance(found, tuple) else (found,)):
            serving.append(name)
    if head.can_generate() and not any("Seq2Seq" in name for name in serving):
        return ["AutoModelForCausalLM", *(name for name in serving if name == IMAGE_TEXT)]
    if not serving:  # one with a projection, a backbone; of code that travels along, what writes text
        return ["AutoModel" if getattr(transformers, head.__name__, None) is head else "AutoModelForCausalLM"]
    return [name for name in serving if name != "AutoModelForPreTraining"] or serving


def code_files(plan: Plan, natives: SourceClasses) -> dict[str, str]:
    """File name -> text of all the code that the checkpoint carries."""
    files = flat_files(
        [*mixer_files(plan), *(["capture"] if captured(plan) else []), *plan_parts(plan), "attention_hooks"]
    )
    return {MODELING_FILE: modeling(__version__, plan, natives, files)} | files


def modeling(version: str, plan: Plan, natives: SourceClasses, files: Mapping[str, str]) -> str:
    """modeling_linearized.py as linearize `version` writes it beside the kernel files `files` (name -> text)."""
    templates, config = templates_of(version), natives.config.__name__
    mixers = {name: mixer_class(files.get(f"{name}.py", "")) for name in mixer_files(plan)}
    carried = mixers | ({"capture": "capture"} if captured(plan) else {})
    hooks = "attention_hooks" if "attention_hooks.py" in files else EARLIER["attention_hooks"][0]
    # Files of earlier versions import their parts themselves; what a window needs they never did.
    brought = reached([m for root in (*carried, hooks) for m in imported(files.get(f"{root}.py", ""))], files)
    wanted = plan_parts(plan)
    wanted |= dict(EARLIER[file] for file in wanted.keys() & EARLIER.keys())
    parts = {file: name for file, name in sorted(wanted.items()) if f"{file}.py" in files.keys() - brought}
    names = dict.fromkeys((*carried.items(), *parts.items()))
    imports = [f"from .{file} import {name}" for file, name in names]
    capture = templates.capture if captured(plan) else ""
    class_pairs = ", ".join(f'("{m.__name__}", "Linearized{m.__name__}")' for m in natives.written)
    bare = natives.models[0].__name__
    return templates.modeling.format(
        version=written(version),
        architecture=plan.architecture,
        model_type=natives.model_type,
        config=config,
        imports=_imports([natives.config, *natives.written]),
        mixer_imports="\n".join(imports),
        mechanisms=", ".join(f'"{name}": {mixer}' for name, mixer in mixers.items()),
        classes="\n".join(
            templates.model_class.format(native=m.__name__, config=config, capture=capture)
            + (templates.bare.format(bare=bare) if m not in natives.models else "")
            for m in natives.written
        ),
        pairs=", ".join([f'("{natives.model_type}", "linearized_{natives.model_type}")', class_pairs]),
        class_pairs=class_pairs,
        hooks=hooks,
    )


def mixer_files(plan: Plan) -> list[str]:
    """The plan's mechanisms; a checkpoint has a file of that name for each."""
    return sorted({step.mechanism for step in plan.steps})


def mixer_class(text: str) -> str:
    """The name of the mixer that the text of a kernel file defines; empty where it defines none."""
    found = MIXER_CLASS.search(text)
    return found[1] if found else ""


def captured(plan: Plan) -> bool:
    """Whether a layer of the plan computes its softmax itself."""
    return any(not step.site.routed for step in plan.steps)


def plan_parts(plan: Plan) -> dict[str, str]:
    """Files that options of the plan switch on, beside those of its mechanisms, and one that decodes hybrids: flat name
    -> a name in it, sorted."""
    mixed = not plan.spec()["all_linear"]  # what config.json knows of layers that are kept
    found: dict[str, str] = {"static_layers": "StaticLayers"} if mixed and not captured(plan) else {}
    for step in plan.steps:
        found |= parts_of(step.mechanism, step.site, step.options)
    return dict(sorted(found.items()))


def _imports(classes: list[type]) -> str:
    """Import lines for native classes, one per module."""
    modules: dict[str, list[str]] = {}
    for cls in classes:
        modules.setdefault(_import_path(cls), []).append(cls.__name__)
    return "\n".join(f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(modules.items()))


def _import_path(cls: type) -> str:
    """Where the checkpoint imports a native class from: transformers, or code that the source carries itself."""
    if getattr(transformers, cls.__name__, None) is cls:
        return "transformers"
    if cls.__module__.startswith("transformers_modules."):
        return "." + cls.__module__.rpartition(".")[2]
    return cls.__module__
