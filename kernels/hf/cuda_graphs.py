"""Decode steps of `generate()` as one CUDA graph.

A decode step of a small or middling model takes a GPU less time than Python needs to ask for it. Where every layer is
linear nothing of a step depends on how many tokens went before: its state has one size, so one recording of the
step's kernels serves every later token. The recorded step sees an empty cache that brings a state along, the position
of its token, and that token's column of the padding mask; its first answer must equal the plain step's bit for bit,
else the plain steps go on. Anything that a recording would skip or fix (hooks, other inputs) keeps the plain steps too.

Layers that keep softmax read more with every token. In a hybrid their keys lie in buffers with room for more
(static_layers.py), and when these are full a step is recorded again. Its answer equals the plain step's up to rounding,
since softmax is summed in another order.

generate(disable_compile=True) keeps the steps plain; generate(compile_config=CompileConfig()) records the compiled
step where all layers are linear, which is faster again, and takes a quarter of a minute for a model's first call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .cache import CACHE_NAMES, cache_in, grows, map_state
from .interface import ALL, HYBRID, split_name

log = logging.getLogger(__name__)

# Steps before the recording: a few tokens are not worth one, and kernels compile and choose algorithms in them.
PLAIN_STEPS = 2
# Inputs that change from step to step; of the mask only the last column does.
TENSORS = ("input_ids", "position_ids", "attention_mask")
DEVICES = ("cuda",)
# Files whose hooks do nothing that a recorded step would lack.
OWN = ("attention_hooks", "position_hooks", "modeling_utils")
# Attention functions whose masks say what a token sees, one column a token.
BACKENDS = ("sdpa", "eager")
# Whose waiting for the GPU is left out of a recording: masks are looked at there, and made in full while one runs.
MASKS = "masking_utils.py"
# The recorders of all calls of generate() that run now, and of some that are over, until Python collects them.
running: weakref.WeakSet[Replay] = weakref.WeakSet()
# One for each GPU: cuBLAS keeps 32 MiB for every stream that it was recorded on.
streams: dict[torch.device, torch.cuda.Stream] = {}


class Replayed:
    """What a model class needs for generate() to replay."""

    # The settings of the last compilation and what it made.
    compiled_step: tuple[dict[str, Any], Callable[..., Any]] | None = None

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Asked by generate(), which then calls what `get_compiled_call` returns for each decode step."""
        wanted = self.replays if generation_config.compile_config is None else self.compiles
        if not generation_config.disable_compile and wanted():
            return True
        parent: Any = super()
        return parent._valid_auto_compile_criteria(model_kwargs, generation_config)

    def get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        """A recorder of its own for each call of generate(); for softmax what transformers has."""
        parent: Any = super()
        if not (self.replays() if compile_config is None else self.compiles()):
            return parent.get_compiled_call(compile_config)
        return Replay(self, None if compile_config is None else self.compiled(compile_config))

    def compiles(self) -> bool:
        """Whether a compiled step can be recorded: all layers must be linear."""
        model: Any = self
        return split_name((model.linearize_switch or model.config)._attn_implementation)[0] == ALL and self.replays()

    def replays(self) -> bool:
        """Whether each layer is linear in all heads, or keeps softmax in all of them, on one GPU, and nothing is hooked
        in that a recording would skip."""
        model: Any = self
        prefix, backend = split_name((model.linearize_switch or model.config)._attn_implementation)
        known = prefix == ALL or (prefix == HYBRID and backend in BACKENDS)
        if not known or model.training or model.device.type not in DEVICES:
            return False
        modules: list[Any] = list(model.modules())
        hooks = [hook for m in modules for own in (m._forward_pre_hooks, m._forward_hooks) for hook in own.values()]
        return (
            # Gradient checkpointing leaves a hook of transformers' behind, of no effect here.
            all(getattr(hook, "__module__", "").rpartition(".")[2] in OWN for hook in hooks)
            and not any(hasattr(module, "_hf_hook") for module in modules)
            and not any(getattr(module, "softmax", None) for module in modules if hasattr(module, "site"))
            and all(p.device == model.device for p in model.parameters())
        )

    def compiled(self, compile_config: Any) -> Callable[..., Any]:
        """The model as torch.compile makes it, without CUDA graphs of its own."""
        settings = compile_config.to_dict() | {"mode": None}
        if self.compiled_step is None or self.compiled_step[0] != settings:
            call: Any = self
            self.compiled_step = settings, torch.compile(call.__call__, **settings)
        return self.compiled_step[1]


class Replay:
    """Called by generate() in place of the model, for the decode steps of one call of generate()."""

    def __init__(self, model: Any, compiled: Callable[..., Any] | None = None) -> None:
        self.model, self.compiled, self.calls = model, compiled, 0
        self.thread = threading.current_thread()
        self.step: Step | None = None
        running.add(self)

    def __call__(self, **inputs: Any) -> Any:
        self.calls += 1
        due = self.calls == PLAIN_STEPS + 1 or (self.step is not None and self.step.full())
        if due and self.alone() and recordable(inputs):
            return self.record(inputs)
        if self.step is not None and self.step.fits(inputs):
            return self.step(inputs)
        return self.model(**inputs)

    def alone(self) -> bool:
        """Whether no other thread generates: while one records, the others cannot draw random numbers."""
        return not any(one.thread is not self.thread and one.thread.is_alive() for one in running)

    def record(self, inputs: dict[str, Any]) -> Any:
        """One plain step, and the recorded one on a copy of the state to compare it with."""
        cache, self.step = cache_in(inputs), None
        layers, kept = state_layers(cache), [layer for layer in cache.layers if grows(layer)]
        before = [map_state(dense_copy, layer.state) for layer in layers]
        with waiting() as waited:
            plain = self.model(**inputs)
        after = [(layer.state, layer.seen) for layer in layers]
        keys = [(layer.keys, layer.values) for layer in kept]
        for layer in kept:  # the recorded step adds the token again
            layer.keys, layer.values = layer.keys[:, :, :-1], layer.values[:, :, :-1]
        try:
            if waited:
                raise RuntimeError("they wait for the GPU")
            # A checkpoint has that file where layers keep softmax.
            static_layers = import_module(".static_layers", __package__).StaticLayers(cache.layers) if kept else None
            step = Step(self.compiled or self.model, inputs, before, self.compiled is not None, static_layers)
            self.check(step(inputs).logits, plain.logits, exactly=not (kept or self.compiled))
            self.step = step
        except Exception as error:  # whatever a model does that cannot be recorded
            log.info("decode steps stay plain: %s", error)
            for layer, (own, values) in zip(kept, keys, strict=True):
                layer.keys, layer.values = own, values
        for layer, (state, seen) in zip(layers, after, strict=True):
            layer.state, layer.seen = state, seen
        return plain

    def check(self, found: Tensor, plain: Tensor, exactly: bool) -> None:
        """Raise ValueError unless a replay answers as the plain step does, `exactly` or up to rounding."""
        off = float((found - plain).abs().max() / plain.abs().max())
        rounding = max(8 * torch.finfo(plain.dtype).eps, 1e-4)
        if not (torch.equal(found, plain) if exactly else off <= rounding):
            raise ValueError(f"the recorded one differs by {off:.1e}")


class Step:
    """A recorded step: buffers for what goes in, the state, and what comes out."""

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: dict[str, Any],
        states: list[Any],
        trial: bool = False,
        static_layers: Any = None,
    ) -> None:
        """`states` become the buffers; `static_layers` has those of the layers that keep softmax. With `trial`, and with
        static layers, the step runs once before it is recorded. Raises ValueError where it would be wrong for later
        tokens."""
        self.model, self.cache, self.static_layers = model, cache_in(inputs), static_layers
        self.name = next(name for name in CACHE_NAMES if name in inputs)
        self.layers, self.states = state_layers(self.cache), states
        self.inputs = {name: last(name, inputs[name]).clone() for name in tensor_names(inputs)}
        self.others = {name: value for name, value in inputs.items() if name not in (*TENSORS, *CACHE_NAMES)}
        self.output: Any = None
        self.rows = torch.arange(len(self.inputs["input_ids"]), device=self.inputs["input_ids"].device)
        self.hold()
        if static_layers is not None:
            static_layers.enter(self.cache.layers, inputs.get("attention_mask"))
        if trial or static_layers is not None:
            kept = [part.clone() for part in parts(states)]
            self.run()
            torch._foreach_copy_([*parts(states)], kept)
        if static_layers is not None:
            static_layers.end_trial()
        if static_layers is not None and static_layers.places.count.is_cuda:
            torch.cuda.empty_cache()  # a recording cannot free what the allocator keeps, here buffers of another size
        self.replay = capture(self.run, self.inputs["input_ids"])

    def fits(self, inputs: dict[str, Any]) -> bool:
        """Whether these inputs differ from the recorded ones in numbers only."""
        others = {name: value for name, value in inputs.items() if name not in (*TENSORS, *CACHE_NAMES)}
        mask = inputs.get("attention_mask")
        return (
            cache_in(inputs) is self.cache
            and not self.full()
            and others == self.others
            and tensor_names(inputs) == list(self.inputs)
            and all(last(name, inputs[name]).shape == own.shape for name, own in self.inputs.items())
            and (
                self.static_layers is None
                or mask is None
                or mask.shape[1] == self.static_layers.held(self.cache.layers) + 1
            )
        )

    def full(self) -> bool:
        """Whether softmax has no room for another token."""
        return self.static_layers is not None and not self.static_layers.fit(self.cache.layers)

    def run(self) -> None:
        """What is recorded: the model's step from the buffers into the buffers. Most mixers change their states in place."""
        inputs, layers, seen = self.inputs, self.cache.layers, 0
        if self.static_layers is not None:
            inputs, seen = (
                inputs | {"attention_mask": self.static_layers.places.real},
                self.static_layers.places.size - 1,
            )
            self.cache.layers = self.static_layers.stand_in(layers)
        for layer in self.layers:
            layer.seen, layer.rows = seen, self.rows
        try:
            self.output = self.model(**inputs, **self.others, **{self.name: self.cache})
        finally:
            self.cache.layers = layers
            for layer in self.layers:
                layer.rows = None
        new, old = [*parts([layer.state for layer in self.layers])], [*parts(self.states)]
        if [(x.shape, x.dtype) for x in new] != [(x.shape, x.dtype) for x in old]:
            raise ValueError("the state changes its shape from token to token")
        moved = [(x, y) for x, y in zip(old, new, strict=True) if x is not y]
        if moved:
            torch._foreach_copy_([x for x, _ in moved], [y for _, y in moved])
        self.hold()

    def hold(self) -> None:
        """The cache's state is what lies in the buffers."""
        for layer, state in zip(self.layers, self.states, strict=True):
            layer.state = state

    def __call__(self, inputs: dict[str, Any]) -> Any:
        seen = [layer.seen for layer in self.layers]
        for name, own in self.inputs.items():
            own.copy_(last(name, inputs[name]))
        for layer, state in zip(self.layers, self.states, strict=True):
            if layer.state is not state:  # someone reordered, or wrote, this cache
                torch._foreach_copy_([*parts(state)], [*parts(layer.state)])
        self.hold()
        if self.static_layers is not None:
            self.static_layers.enter(self.cache.layers, inputs.get("attention_mask"))
        self.replay()
        if self.static_layers is not None:
            self.static_layers.leave(self.cache.layers)
        for layer, tokens in zip(self.layers, seen, strict=True):
            layer.seen = tokens + 1
        out = {name: value.clone() if isinstance(value, Tensor) else value for name, value in self.output.items()}
        return type(self.output)(**out)


@contextlib.contextmanager
def waiting() -> Iterator[list[str]]:
    """Within: each place in the code that waits for the GPU, which cannot be recorded, is added to the list."""
    lines: list[str] = []
    if not torch.cuda.is_available():
        yield lines
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            lines += [
                f"{os.path.basename(one.filename)}:{one.lineno}"
                for one in warned
                if "called a synchronizing CUDA" in str(one.message) and not one.filename.endswith(MASKS)
            ]


def capture(run: Callable[[], None], x: Tensor) -> Callable[[], None]:
    """Record what `run` asks of the GPU of `x`; the result asks for it again.

    Not `torch.cuda.graph`: it collects garbage and empties the allocator's cache, which takes longer than the step.
    """
    if x.device not in streams:
        streams[x.device] = torch.cuda.Stream(x.device)
    graph, stream = torch.cuda.CUDAGraph(), streams[x.device]
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
            graph.capture_end()
        except BaseException:
            give_up(graph, x)
            raise
    torch.cuda.current_stream(x.device).wait_stream(stream)
    return graph.replay


def give_up(graph: torch.cuda.CUDAGraph, x: Tensor) -> None:
    """A recording that failed leaves the allocator and the random generator of the device in it; take them out."""
    with contextlib.suppress(Exception):
        graph.capture_end()
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(x.device.index, graph.pool())
    with contextlib.suppress(Exception), torch.cuda.stream(torch.cuda.Stream(x.device)):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        x.clone()
        graph.capture_end()


def dense_copy(x: Tensor) -> Tensor:
    """A copy whose rows can be changed in place."""
    return x.clone(memory_format=torch.contiguous_format)


def state_layers(cache: Any) -> list[Any]:
    """The slots of a cache that hold a state."""
    return [layer for layer in cache.layers if hasattr(layer, "state")]


def parts(state: Any) -> Iterator[Tensor]:
    """The tensors of a state, which may hold other states."""
    if isinstance(state, Tensor):
        yield state
    elif state is not None:
        for part in state:
            yield from parts(part)


def tensor_names(inputs: dict[str, Any]) -> list[str]:
    return [name for name in TENSORS if inputs.get(name) is not None]


def last(name: str, x: Tensor) -> Tensor:
    """Of the padding mask the new token's column, other inputs as they are."""
    return x[:, -1:] if name == "attention_mask" else x


def recordable(inputs: dict[str, Any]) -> bool:
    """Whether a step has one token a row, known positions, plain settings, and a cache that holds states, and keys that
    grow, and does not record its past."""
    ids, places, mask = (inputs.get(name) for name in TENSORS)
    cache = cache_in(inputs)
    others = [value for name, value in inputs.items() if name not in (*TENSORS, *CACHE_NAMES)]
    return (
        ids is not None
        and ids.shape[-1] == 1
        and places is not None
        and places.shape[-1] == 1
        and (mask is None or mask.ndim == 2)
        and all(value is None or isinstance(value, bool | int | str) for value in others)
        and not inputs.get("output_hidden_states")
        and isinstance(cache, Cache)
        and all(
            hasattr(layer, "state") or grows(layer) or not getattr(layer, "is_initialized", True)
            for layer in cache.layers
        )
        and not any(getattr(layer, "record_past", False) for layer in cache.layers)
    )
