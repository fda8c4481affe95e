"""Diffusion transformers of diffusers: how a mixer takes the place of softmax inside an attention processor.

    block -> attn1, with its own projections -> attn1.processor
                                                |- teacher: the processor that was there, as it is
                                                '- student: the code of one, and where that calls softmax the mixer

A processor of diffusers projects q, k and v, normalises and rotates them, calls one function for softmax and projects
what comes out. Here its code runs unchanged, on globals in which that function's name leads to the mixer: nothing of
it is copied, nothing of torch or diffusers is changed for others, and torch.compile makes one graph of it.

diffusers is not imported here: the one file of a saved model (linearize/diffusion/code.py) hands its classes over.
"""

from __future__ import annotations

import inspect
import os
import shutil
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..layout import TokenLayout, adapters, call_grid, check_thread, this_thread, watch_patches
from ..mixer import Mixer, AttentionSite

# The functions through which processors compute softmax: on [B,T,H,D], and on [B,H,T,D] as a member of F.
DISPATCH, FUSED = "dispatch_attention_fn", "scaled_dot_product_attention"
ROTATION = "rotary_emb"  # what processors call the rotary embedding among their arguments


class Processor(nn.Module):
    """The attention processor of one module; its `mixer` is part of the model, `native` the processor before it.

    `reader` is the class whose code leads q, k and v to the mixer: that of `native`, unless it computes no softmax.
    """

    def __init__(self, native: Any, mixer: Any, reader: Any = None) -> None:
        super().__init__()
        self.native, self.mixer, self.reader = native, mixer, reader or type(native)
        # The thread that is inside teacher(), None: there is none.
        self.teaching: int | None = None
        # Hidden states of a call that has not reached the mixer yet, by thread.
        self.calls: dict[int, Tensor] = {}
        self._lead()

    def _lead(self) -> None:
        """Make the function that is run, and the names of its arguments after the attention module."""
        code = self.reader.__call__
        self.names = tuple(inspect.signature(code).parameters)[2:]
        fused = types.SimpleNamespace(**{**vars(F), FUSED: self.attend_fused})
        self.lead = on_other_globals(code, {"F": fused, DISPATCH: self.attend})

    def __getstate__(self) -> dict[str, Any]:
        """A copy leads to its own mixer."""
        return {**self.__dict__, "lead": None, "calls": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lead()

    def forward(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """What a processor does for the attention module `attn`: hidden states [B,T,hidden] to the same shape.

        Raises RuntimeError when its code did not call softmax exactly once.
        """
        if self.teaching is not None:
            check_thread(self.teaching)
            return self.native(attn, *args, **kwargs)
        bound = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if self.mixer.drop_rope and ROTATION in bound:
            bound[ROTATION] = None
        thread = this_thread()
        self.calls[thread] = bound["hidden_states"]
        try:
            output = self.lead(self.native, attn, **bound)
        finally:
            left = self.calls.pop(thread, None)
        if left is not None:
            raise RuntimeError(f"{self.reader.__name__} of diffusers computed no softmax: its mixer was skipped")
        return output

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **_: Any) -> Tensor:
        """The mixer in place of softmax: q, k [B,T,H,D], v [B,T,H,Dv] -> [B,T,H,Dv]."""
        x = self.calls.pop(this_thread(), None)
        if x is None or attn_mask is not None:
            wrong = "is called with a mask" if x is not None else "calls softmax more than once"
            raise RuntimeError(f"{self.reader.__name__} of diffusers {wrong}, for which its mixer has no meaning")
        mixer = self.mixer
        grid = call_grid(mixer.site, query.shape[1], {}, mixer.patches) if mixer.geometric else None
        return mixer(query, key, value, x, TokenLayout(causal=False, grid=grid))[0].to(query.dtype)

    def attend_fused(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **_: Any) -> Tensor:
        """The same with heads before tokens."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return self.attend(query, key, value, attn_mask).transpose(1, 2)


def on_other_globals(function: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of `function` that finds `names` where it looked for its module's globals, as far as there were such."""
    own = function.__globals__
    # Without a name, torch.compile takes the globals as they are rather than those of the module.
    found = {k: v for k, v in own.items() if k != "__name__"} | {k: v for k, v in names.items() if k in own}
    copy = types.FunctionType(function.__code__, found, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def attach(model: Any, spec: dict[str, Any], mechanisms: Mapping[str, type[Mixer]], readers: Mapping[str, Any]) -> None:
    """Give each module named in `spec["layers"]` a processor with its mixer.

    `readers`: class names of processors that compute no softmax, and the class that reads q, k and v as they do.
    Raises AttributeError when the model lacks a module of the plan.
    """
    for layer in spec["layers"]:
        site = AttentionSite.from_dict(layer["site"])
        module = model.get_submodule(site.path.removesuffix(".processor"))
        mixer = mechanisms[layer["mechanism"]](site, **layer["options"])
        if not any(p.is_meta for p in mixer.parameters()):
            mixer.reset_parameters()
        mixer.patches = watch_patches(model.get_submodule(site.grid_from))
        native = module.processor
        module.set_processor(Processor(native, mixer, readers.get(type(native).__name__)))


class Linearized:
    """Mixin before a transformer class of diffusers; `linearized` makes such classes."""

    code: str
    modules: Callable[[], Iterator[nn.Module]]

    @contextmanager
    def teacher(self) -> Iterator[None]:
        """Within: the attention processors of the source, and so the source bit for bit, on the same weights; adapters
        are off.

        A call in another thread meanwhile raises RuntimeError, and so does `teacher()` there.
        """
        processors = [module for module in self.modules() if isinstance(module, Processor)]
        outer = next(processor.teaching for processor in processors)
        check_thread(outer)
        for processor in processors:
            processor.teaching = threading.get_ident()
        try:
            with adapters(self, enabled=False):
                yield
        finally:
            for processor in processors:
                processor.teaching = outer

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As any model of diffusers, which would leave the code behind."""
        os.makedirs(save_directory, exist_ok=True)
        shutil.copyfile(self.code, os.path.join(save_directory, os.path.basename(self.code)))
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    def enable_parallelism(self, *args: Any, **kwargs: Any) -> None:
        """Raises NotImplementedError: each device would summarise its own tokens alone."""
        raise NotImplementedError("linear attention is not computed in parallel over parts of the tokens or heads")

    def set_attn_processor(self, *args: Any, **kwargs: Any) -> None:
        """Raises NotImplementedError: the mixers are in the processors, and would be gone without a word."""
        raise NotImplementedError("other attention processors would take the mixers out; teacher() computes softmax")

    # What enable_xformers_memory_efficient_attention calls on a pipeline's models, and those on all of their modules.
    set_use_memory_efficient_attention_xformers = set_attn_processor


def linearized(native: Any, mechanisms: Mapping[str, type[Mixer]], readers: Mapping[str, Any], code: str) -> Any:
    """The class `Linearized<native>`: its config also has `linearize`, which modules have which mixer.

    `code` is the file that defines it, which models of this class take along when they are saved.
    """

    def __init__(self: Any, *args: Any, linearize: Any = None, auto_map: Any = None, **kwargs: Any) -> None:
        native.__init__(self, *args, **kwargs)
        self.register_to_config(linearize=linearize, auto_map=auto_map)
        attach(self, linearize, mechanisms, readers)

    # diffusers reads from the signature what a config may hold.
    known = inspect.signature(native.__init__)
    ours = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("linearize", "auto_map")]
    __init__.__signature__ = known.replace(parameters=[*known.parameters.values(), *ours])  # type: ignore[attr-defined]
    module = os.path.basename(code).removesuffix(".py")
    body = {"__init__": __init__, "__module__": module, "__doc__": f"{native.__name__} with mixers.", "code": code}
    return type(native)(f"Linearized{native.__name__}", (Linearized, native), body)
