"""Find softmax attention in models that do not call transformers' attention interface."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize_kernels.hf.capture import Capture, Scores, scores_of

from .token_grid import PatchTracer, looks_back

# Arguments of an attention module that mean a bias on its scores even when the model merges it into the mask.
BIASES = {"alibi", "position_bias"}


def softmax_calls(model: PreTrainedModel, inputs: dict[str, Tensor], follow: PatchTracer) -> list[dict[str, Any]]:
    """One forward of a model on the meta device: a record for each softmax attention that a module computes itself.

    `follow` is on, and knows where tokens lie.

    Raises whatever the architecture raises there, and NotImplementedError for attention of another form.
    """
    running: list[tuple[nn.Module, dict[str, Any]]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [*inspect.signature(module.forward).parameters]
        running.append((module, {**dict(zip(names, args, strict=False)), **kwargs}))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running.pop()

    modules: list[tuple[str, Any]] = list(model.named_modules())
    for path, module in modules:
        module._linearize_path = path
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)
    # Without a mask some look at the values of positions, which meta tensors lack; others know no 4D mask.
    masks: list[dict[str, Tensor]] = [{}]
    if [*inputs] == ["input_ids"]:
        T = inputs["input_ids"].shape[1]
        masks.append({"attention_mask": torch.ones(1, 1, T, T, dtype=torch.bool, device="meta")})
    cache = {"use_cache": False} if model.can_generate() else {}
    errors: list[RuntimeError] = []
    for mask in masks:
        running.clear()
        try:
            with Watch(model, running, follow) as watch, torch.no_grad():
                model(**inputs, **mask, **cache)
            return watch.records
        except RuntimeError as error:
            errors.append(error)
    raise errors[0]


@dataclasses.dataclass
class Seen(Scores):
    """Scores, the factor on them, and what besides masks was combined with them."""

    scale: float = 1.0
    extras: set[str] = dataclasses.field(default_factory=set)


class Watch(Capture):
    """Records what `Capture` finds. `running` are the modules whose forward is on, with their arguments by name."""

    kind = Seen

    def __init__(
        self, model: PreTrainedModel, running: list[tuple[nn.Module, dict[str, Any]]], follow: PatchTracer
    ) -> None:
        super().__init__(self.record, (0, 0), compute=True)
        self.model, self.running, self.follow = model, running, follow
        self.records: list[dict[str, Any]] = []

    def hidden(self) -> Tensor | None:
        """What the module that runs was given first, or as `hidden_states`."""
        arguments = self.running[-1][1] if self.running else {}
        return arguments.get("hidden_states", next(iter(arguments.values()), None))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, (given, *others) = self.hidden(), self.follow.inputs.values()
        # The tokens of text stay as many as they are; those of images become fewer from stage to stage.
        shrinking = bool(others) or given.is_floating_point()
        rows = x if isinstance(x, Tensor) and x.ndim == 3 and shrinking else given
        self.shape = rows.shape[0], rows.shape[1]
        result = super().__torch_function__(function, types, args, kwargs)
        if function in (torch.zeros, torch.zeros_like):
            result._linearize_zeros = True
        return result

    def onwards(self, name: str, held: Tensor, tensors: list[Tensor], call: Any) -> Any:
        found, factors = scores_of(held), [arg for arg in call.args if isinstance(arg, float | int)]
        if name in ("mul", "div") and factors and isinstance(found, Seen) and not found.softmax:
            found.scale *= factors[0] if name == "mul" else 1 / factors[0]
        return super().onwards(name, held, tensors, call)

    def product(self, q: Tensor, k: Tensor, bias: list[Tensor], call: Any) -> Tensor:
        scores = super().product(q, k, bias, call)
        found = scores_of(scores)
        assert isinstance(found, Seen)
        found.scale = float(call.keywords.get("alpha", 1.0))
        return scores

    def meet(self, name: str, other: Tensor, found: Scores) -> None:
        super().meet(name, other, found)
        assert isinstance(found, Seen)
        if hasattr(other, "_linearize_zeros"):  # what baddbmm is given where there is no bias
            return
        memory = other.untyped_storage()._cdata
        arguments = {
            argument: value.untyped_storage()._cdata
            for argument, value in self.running[-1][1].items()
            if isinstance(value, Tensor)
        }
        unnamed = "own_mask" if other.dtype == torch.bool else "score_bias"
        found.extras.add(next((argument for argument, its in arguments.items() if its == memory), unnamed))

    def record(self, found: Any, v: Tensor, softmax: Any) -> Tensor:
        """What `Capture` found: a record like those of the attention interface."""
        module, arguments = self.running[-1]
        x, B = self.hidden(), self.shape[0]
        q, k = (part.reshape(B, -1, *part.shape[-2:]) for part in (found.q, found.k))
        where = self.follow.place(self.shape, module, arguments)
        stated = self.follow.decodes(q.shape[2]) or getattr(module, "is_causal", None)  # None where nothing tells
        self.records.append(
            {
                "module": module,
                "path": module._linearize_path,
                "hidden": x.shape[-1] if isinstance(x, Tensor) and x.ndim == 3 else None,
                "heads": q.shape[1],
                "kv_heads": k.shape[1],
                "key_dim": q.shape[-1],
                "value_dim": v.shape[-1],
                "scale": found.scale,
                "causal": looks_back(stated, self.model, where),
                "denies": False,
                "extras": tuple(sorted(found.extras - {"attention_mask"} | BIASES & _given(arguments))),
                "keys": k.shape[2],
                "queries": q.shape[2],
                "routed": False,
                "rotation": bool({"position_embeddings", "position_ids"} & _given(arguments)),
                "numbered": "position_embeddings" not in _given(arguments),
                **where,
            }
        )
        return softmax()

    def values(self, found: Any, v: Tensor, shape: torch.Size, call: Any) -> Tensor:
        if call.func is F.scaled_dot_product_attention:
            found.scale = call.keywords.get("scale") or found.q.shape[-1] ** -0.5
        return super().values(found, v, shape, call)


def _given(arguments: dict[str, Any]) -> set[str]:
    return {name for name, value in arguments.items() if value is not None}
