"""The student: which parameters a stage trains, and the teacher, which must not change meanwhile.

While every source weight is frozen the teacher is the same model with softmax switched on and adapters off. Once
a stage trains source weights, the teacher's values of exactly those tensors are kept aside and swapped in for the
length of a teacher pass, unless the recipe names another teacher. Tensors go by the names that they have without
adapters.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from linearize_kernels.layout import adapters

from ..errors import IncompatibleError, did_you_mean
from ..recipe.recipe import Stage
from .fsdp import is_divided, like, optimizer_parameter, reshard, whole

ADAPTER = "default"


class Student:
    """A linearized model in training: its adapters, its trained tensors, its teacher.

    `model` is the linearized model itself (never a wrapper); `originals` holds the source's values of the source
    tensors that some stage trains or trained, on the model's device. With `own_teacher` false there are none: the
    recipe has another teacher, which is `other`, or whose predictions come with the data, or it has none.
    `vocabulary` is how many tokens the model and another teacher both have logits of.
    """

    def __init__(self, model: Any, own_teacher: bool = True) -> None:
        self.model = model
        self.own_teacher = own_teacher
        self.other: Any = None
        self.vocabulary: int | None = None
        self.dtype: torch.dtype = model.dtype  # of the source's weights as they were loaded
        self.lora: Any = None
        self.originals: dict[str, Tensor] = {}
        self.trained: set[str] = set()
        self._streams = False  # whether embeddings and norms put out the model's dtype already
        self._aside: dict[str, Tensor] = {}  # the student's own values while the source's are swapped in

    @property
    def has_teacher(self) -> bool:
        """Whether there is anything to learn from: its own softmax, another model, or predictions with the data."""
        return self.own_teacher or self.other is not None or self.vocabulary is not None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, or their shards, by names that stay when peft moves an adapted weight into `base_layer`."""
        for name, parameter in self.model.named_parameters():
            yield name.replace(".base_layer.", "."), optimizer_parameter(parameter)

    # ------------------------------------------------------------ what trains

    def prepare(self, stage: Stage, *, wide: bool, seed: int = 0) -> list[nn.Parameter]:
        """Set requires_grad for a stage and return its parameters; with `wide` they become float32 masters, but for
        source weights of a stage whose optimizer is small, which have the model's dtype."""
        if stage.lora is not None and self.lora is None:
            torch.manual_seed(seed)
            self.lora = inject_lora(self.model, stage.lora)
        names = self.names_of(stage.train)
        if wide:
            self.keep_stream()
        self.keep_originals(names)
        self.trained |= names
        if wide:
            self.widen(names, self.narrow(stage))
        chosen = []
        for (name, parameter), own in zip(self.named_parameters(), self.model.parameters(), strict=True):
            own.requires_grad_(name in names)
            if name in names:
                chosen.append(parameter)
        return chosen

    def keep_stream(self) -> None:
        """Before embeddings and norms of a model in bf16 become float32 masters: their outputs keep the model's dtype.

        Autocast leaves them in float32, and with them the input of every layer and the sum of all: twice the memory of
        what the teacher has, and what FSDP2 has in its shards.
        """
        if self._streams or self.dtype == torch.float32:
            return
        for name, module in self.model.named_modules():
            own = [p for p in module._parameters.values() if p is not None] if is_source(f".{name}.") else []
            plain = isinstance(module, nn.Embedding) or all(p.ndim < 2 for p in own)
            if own and plain and all(p.dtype == self.dtype for p in own):
                module.register_forward_hook(self._narrowed)
        self._streams = True

    def _narrowed(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """The output of a source module, of which float32 masters make float32; without autocast as it is."""
        wide = isinstance(output, Tensor) and output.dtype == torch.float32
        if not wide or not torch.is_autocast_enabled(output.device.type):
            return output
        return output.to(self.dtype)

    def widen(self, names: set[str], narrow: set[str]) -> None:
        """Make float32 masters of these parameters, but give those in `narrow` the model's dtype."""
        for name, parameter in self.named_parameters():
            if name in names:
                due = self.dtype if name in narrow else torch.float32
                if parameter.dtype != due:
                    parameter.data = parameter.data.to(due)

    def groups(self, stage: Stage, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        """A stage's parameters as an optimizer's groups; `factor` is what multiplies the stage's learning rate.

        New parameters may have their own. Shards and whole tensors lie apart: one kernel takes no mixture.
        """
        new = {id(parameter) for name, parameter in self.named_parameters() if ".mixer." in name}
        factor = (stage.optimizer.new_lr or stage.optimizer.lr) / stage.optimizer.lr
        found: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            key = (factor if id(parameter) in new else 1.0, isinstance(parameter, DTensor))
            found.setdefault(key, []).append(parameter)
        return [{"params": group, "factor": key[0]} for key, group in sorted(found.items(), key=lambda item: item[0])]

    def names_of(self, parts: tuple[str, ...]) -> set[str]:
        """Names of the parameters that `new`, `mixer`, `lora`, `all` stand for."""
        folders = {"new": [f"{path}.mixer." for path in self.sites()], "mixer": [f"{path}." for path in self.sites()]}
        within = tuple(prefix for part in parts for prefix in folders.get(part, ()))
        names = set()
        for name, _ in self.named_parameters():
            adapter = ".lora_" in name
            if "all" in parts or ("lora" in parts if adapter else name.startswith(within)):
                names.add(name)
        return names

    def narrow(self, stage: Stage) -> set[str]:
        """Names of the source weights that a stage trains in the model's own dtype: those of a small optimizer."""
        small = stage.optimizer.memory == "small"
        return {name for name in self.names_of(stage.train) if is_source(name)} if small else set()

    def sites(self) -> list[str]:
        """Paths of the attention modules that have a mixer."""
        return [name.removesuffix(".mixer") for name, _ in self.model.named_modules() if name.endswith(".mixer")]

    def keep_originals(self, names: set[str]) -> None:
        """Clone the source's values of these tensors, unless that was done before an earlier stage."""
        if not self.own_teacher:
            return
        for name, parameter in self.named_parameters():
            if name in names and is_source(name) and name not in self.originals:
                self.originals[name] = parameter.detach().clone()

    def adapted(self) -> set[str]:
        """Names of the source weights that adapters change."""
        inside = (name for name, _ in self.model.named_parameters() if name.endswith(".base_layer.weight"))
        return {name.replace(".base_layer.", ".") for name in inside}

    @property
    def drifted(self) -> set[str]:
        """Names of the source weights that some stage trains or trained, adapters apart."""
        return {name for name in self.trained if is_source(name)}

    # ------------------------------------------------------------ teacher

    @contextlib.contextmanager
    def teacher(self) -> Iterator[Any]:
        """Within: no gradients; yields the model whose logits are learned, this one with softmax or the other."""
        if self.other is None:
            with self.as_teacher():
                yield self.model
        else:
            with torch.no_grad():
                yield self.other

    @contextlib.contextmanager
    def teacher_head(self) -> Iterator[None]:
        """Within: no gradients, and the head of `teacher()`; of a model in shards all but its weights, which
        `chunked_head.gathered_head` has: to swap shards is to copy them."""
        if self.other is None and is_divided(self.model):
            with adapters(self.model, enabled=False), torch.no_grad():
                yield
        else:
            with self.teacher():
                yield

    @contextlib.contextmanager
    def as_teacher(self) -> Iterator[None]:
        """Within: softmax, source weights, no adapters, no dropout, no gradients."""
        with self.teacher_state(), contextlib.ExitStack() as entered:
            with warnings.catch_warnings():  # `trained_before` says it in words of recipes
                warnings.simplefilter("ignore")
                entered.enter_context(self.model.teacher())
            yield

    @contextlib.contextmanager
    def teacher_state(self) -> Iterator[None]:
        """Within: source weights, no adapters, no gradients; the model's own switches turn dropout off."""
        with self.source_weights(), adapters(self.model, enabled=False), torch.no_grad():
            yield

    @contextlib.contextmanager
    def source_weights(self) -> Iterator[None]:
        """Swap the source's values in and back."""
        reshard(self.model)
        self._aside = self._swap(self.originals)
        try:
            yield
        finally:
            reshard(self.model)
            self._swap(self._aside)
            self._aside = {}

    def _swap(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put these tensors where the named parameters are; returns what was there.

        Parameters change places, and nothing is copied.
        FSDP gathers from memory that it knows, so shards are copied; within its forward pass a layer is gathered.
        """
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        old: dict[str, Tensor] = {}
        new: dict[str, nn.Parameter] = {}
        for module in self.model.modules():
            for key, parameter in module._parameters.items():
                name = names.get(id(optimizer_parameter(parameter)), "")
                if name not in values or parameter is None:
                    continue
                if name not in old:  # a tied weight comes twice
                    old[name], new[name] = self._exchange(parameter, values[name])
                module._parameters[key] = new[name]
        return old

    @staticmethod
    def _exchange(parameter: nn.Parameter, value: Tensor) -> tuple[Tensor, nn.Parameter]:
        """What to keep of a parameter, and what to put where it was, so that `value` is there."""
        shard = optimizer_parameter(parameter)
        if isinstance(shard, DTensor):
            kept = shard.detach().clone()
            with torch.no_grad():
                shard.copy_(value)
            return kept, parameter
        value = whole(value, value)
        return parameter, value if isinstance(value, nn.Parameter) else nn.Parameter(value, False)

    @contextlib.contextmanager
    def as_student(self, module: nn.Module) -> Iterator[None]:
        """Within a teacher pass: one module has the student's weights and adapters again."""
        inside = {id(optimizer_parameter(p)) for p in module.parameters()}
        names = {n for n, p in self.named_parameters() if id(p) in inside and n in self._aside}
        source = self._swap({name: self._aside[name] for name in names})
        try:
            with adapters(module, enabled=True):
                yield
        finally:
            self._swap(source)

    def teacher_bytes(self) -> int:
        """Memory of the frozen copies."""
        return sum(t.numel() * t.element_size() for t in self.originals.values())

    # ------------------------------------------------------------ state on disk

    def state(self) -> dict[str, Tensor]:
        """Every tensor that some stage has trained, and the mixers, which calibration may have set, by name."""
        return {n: p.detach() for n, p in self.named_parameters() if n in self.trained or ".mixer." in n}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Copy tensors written by `state` back; names must exist."""
        own = dict(self.named_parameters())
        for name, value in tensors.items():
            if own[name].dtype != value.dtype:
                own[name].data = own[name].data.to(value.dtype)
            own[name].copy_(like(value, own[name]))


def is_source(name: str) -> bool:
    """True for a parameter that the source model has."""
    return ".mixer." not in name and ".lora_" not in name


def check_targets(model: nn.Module, targets: Iterable[str]) -> None:
    """Raise LinearizeError (exit 3) unless each target of LoRA names a linear layer of the source."""
    linear = set(linear_layers(model))
    for target in targets:
        if target not in linear:
            raise IncompatibleError(
                f"lora.target_modules {target!r} is no linear layer of {type(model).__name__}."
                f"{did_you_mean(target, linear)} It has {', '.join(sorted(linear))}"
            )


def linear_layers(model: nn.Module) -> dict[str, type[nn.Module]]:
    """Last names of the source's linear layers, and their classes."""
    found = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and ".mixer." not in n)
    return {name.rpartition(".")[2]: type(module) for name, module in found}


def inject_lora(model: nn.Module, lora: Any) -> Any:
    """LoRA layers on `lora.target_modules`; returns peft's tuner. Raises LinearizeError (exit 3)."""
    from peft import LoraConfig, LoraModel

    check_targets(model, lora.target_modules)
    linear = linear_layers(model)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        bias="none",
        fan_in_fan_out=any(issubclass(linear[target], Conv1D) for target in lora.target_modules),
    )
    return LoraModel(model, config, ADAPTER)
