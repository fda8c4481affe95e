"""What a stage trains, and the teacher that does not move while it does.

While every source weight is frozen the teacher is the same model with softmax switched on and adapters off. Once
a stage trains source weights, the teacher's values of exactly those tensors are kept aside and swapped in for the
length of a teacher pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .errors import Exit, LinearizeError, did_you_mean
from .recipe import Stage

ADAPTER = "default"


class Student:
    """A linearized model in training: its adapters, its trained tensors, its teacher.

    `model` is the linearized model itself (never a wrapper); `originals` holds the source's values of the source
    tensors that some stage trains or trained, on the model's device.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.lora: Any = None
        self.originals: dict[str, Tensor] = {}
        self.trained: set[str] = set()
        self._aside: dict[str, Tensor] = {}  # the student's own values while the source's are swapped in

    # ------------------------------------------------------------ what trains

    def prepare(self, stage: Stage, *, wide: bool) -> list[nn.Parameter]:
        """Set requires_grad for a stage and return its parameters; with `wide` they become float32 masters."""
        if stage.lora is not None and self.lora is None:
            self.lora = inject_lora(self.model, stage.lora)
        names = self.names_of(stage.train)
        self.keep_originals(names)
        self.trained |= set(names)
        chosen = []
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in names)
            if name in names:
                if wide:
                    parameter.data = parameter.data.float()
                chosen.append(parameter)
        return chosen

    def names_of(self, parts: tuple[str, ...]) -> set[str]:
        """Names of the parameters that `new`, `mixer`, `lora`, `all` stand for."""
        prefixes = {"new": [f"{path}.mixer." for path in self.sites()], "mixer": [f"{path}." for path in self.sites()]}
        names = set()
        for name, _ in self.model.named_parameters():
            adapter = ".lora_" in name
            for part in parts:
                if part == "all" or part == "lora" and adapter:
                    names.add(name)
                elif part in prefixes and not adapter and name.startswith(tuple(prefixes[part])):
                    names.add(name)
        return names

    def sites(self) -> list[str]:
        """Paths of the attention modules that have a mixer."""
        return [name.removesuffix(".mixer") for name, _ in self.model.named_modules() if name.endswith(".mixer")]

    def keep_originals(self, names: set[str]) -> None:
        """Clone the source's values of these tensors, unless that was done before an earlier stage."""
        for name, parameter in self.model.named_parameters():
            if name in names and is_source(name) and name not in self.originals:
                self.originals[name] = parameter.detach().clone()

    # ------------------------------------------------------------ teacher

    @contextlib.contextmanager
    def as_teacher(self) -> Iterator[None]:
        """Within: softmax, source weights, no adapters, no dropout, no gradients."""
        with self.teacher_state(), self.model.teacher():
            yield

    @contextlib.contextmanager
    def teacher_state(self) -> Iterator[None]:
        """Within: everything of `as_teacher` but the switch to softmax."""
        with self.source_weights(), _adapters(self.model, enabled=False), evaluating(self.model), torch.no_grad():
            yield

    @contextlib.contextmanager
    def source_weights(self) -> Iterator[None]:
        """Swap the source's values in, by pointer, and back."""
        self._aside = self._swap(self.originals)
        try:
            yield
        finally:
            self._swap(self._aside)
            self._aside = {}

    def _swap(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Point the named parameters at `values`; returns what they pointed at."""
        old = {}
        for name, parameter in self.model.named_parameters():
            if name in values:
                old[name], parameter.data = parameter.data, values[name]
        return old

    @contextlib.contextmanager
    def as_student(self, module: nn.Module) -> Iterator[None]:
        """Within a teacher pass: one module has the student's weights and adapters again."""
        inside = {id(p) for p in module.parameters()}
        names = {n for n, p in self.model.named_parameters() if id(p) in inside and n in self._aside}
        source = self._swap({name: self._aside[name] for name in names})
        try:
            with _adapters(module, enabled=True):
                yield
        finally:
            self._swap(source)

    def teacher_bytes(self) -> int:
        """Memory of the frozen copies."""
        return sum(t.numel() * t.element_size() for t in self.originals.values())

    # ------------------------------------------------------------ state on disk

    def state(self) -> dict[str, Tensor]:
        """Every tensor that some stage has trained, by name."""
        return {n: p.detach() for n, p in self.model.named_parameters() if n in self.trained}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Copy tensors written by `state` back; names must exist."""
        own = dict(self.model.named_parameters())
        for name, value in tensors.items():
            own[name].data = own[name].data.to(value.dtype)
            own[name].copy_(value)
        self.trained |= set(tensors)


def is_source(name: str) -> bool:
    """True for a parameter that the source model has."""
    return ".mixer." not in name and ".lora_" not in name


@contextlib.contextmanager
def _adapters(module: nn.Module, enabled: bool) -> Iterator[None]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in module.modules() if isinstance(m, BaseTunerLayer)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        # The flag alone: peft's own switch would also flip requires_grad of the adapter in the middle of a step.
        layer._disable_adapters = not enabled
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within: dropout off; modules get their own mode back afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def inject_lora(model: nn.Module, lora: Any) -> Any:
    """LoRA layers on the modules named by `lora.target`; returns peft's tuner. Raises LinearizeError (3) if none match."""
    from peft import LoraConfig, LoraModel

    linear = {n.rpartition(".")[2] for n, m in model.named_modules() if _adaptable(m) and ".mixer" not in n}
    unknown = [t for t in lora.target if t not in linear]
    if unknown:
        raise LinearizeError(
            f"lora.target {unknown[0]!r} is no linear layer of {type(model).__name__}."
            f"{did_you_mean(unknown[0], linear)} It has {', '.join(sorted(linear))}",
            Exit.INCOMPATIBLE,
        )
    config = LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.target), bias="none"
    )
    return LoraModel(model, config, ADAPTER)


def _adaptable(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
