"""Mixer: what replaces the softmax of one attention module, and the rule by which mechanisms are found.

A mixer owns only the *new* parameters. It is a child named `mixer` of the attention module that it serves;
projections, norms and rotary embeddings stay with the architecture. The folder is the registry: the mechanism
`gsa` is the one Mixer subclass that the file `gsa.py` defines.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gpu.operators import last_results, results_into
from .layout import TokenLayout, once, part_of
from .layers.norm import HeadNorm
from .layers.pool import check_pool, on_rows, on_sequences


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """One attention module as the probe saw it: everything a mixer may need to know about its place.

    `path` is the module's name inside the model, `scale` the factor that the architecture applies to q.k,
    `extras` the keyword arguments of its softmax that a linear op does not reproduce by itself. `routed` is whether
    it calls transformers' attention interface; if not, its own softmax is captured (capture.py).
    """

    layer: int
    path: str
    kind: str
    hidden: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    causal: bool
    extras: tuple[str, ...] = ()
    routed: bool = True
    # Where its tokens lie: on a `line`; in a `window`, which is square; where the `arguments` height and width of each
    # call say; on `patches`, the output of the convolution at `grid_from`; or `unknown`, for the reason in `grid_from`.
    # `prefix` tokens before and `suffix` tokens after have no place.
    grid: str = "line"
    grid_from: str = ""
    prefix: int = 0
    suffix: int = 0
    # Attributes of the module that make it compute fewer keys than queries, and whether it shall (`keep`, `drop`).
    reduction: tuple[str, ...] = ()
    sr: str = "keep"
    # KV heads whose query heads keep softmax (layers/softmax_heads.py); `heads` and `kv_heads` count them, too.
    softmax_groups: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> AttentionSite:
        """The inverse of `dataclasses.asdict`, also for a record that went through JSON."""
        names = ("extras", "reduction", "softmax_groups")
        return cls(**{**record, **{name: tuple(record.get(name, ())) for name in names}})

    def linear_part(self) -> AttentionSite:
        """The site of the heads that do not keep softmax: what a mechanism is built for."""
        left = self.kv_heads - len(self.softmax_groups)
        return dataclasses.replace(self, heads=self.heads // self.kv_heads * left, kv_heads=left, softmax_groups=())


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Inclusive bounds of a numeric option: `Annotated[int, Bounds(1, 1024)]`."""

    low: float
    high: float


# What one part of a mixer hands to the next: tensors, or None.
Tensors = tuple[Any, ...]


class WindowedState(NamedTuple):
    """What a mechanism remembers, and the tokens of the window beside it."""

    far: Any
    near: Any


class Mixer(nn.Module):
    """Base class of every mechanism. A subclass has a `title`, a `paper` and a `state_formula`, and writes
    `state_bytes` and either `mix` (`mix_with_mass`) or its three parts: `project`, what each token gives by itself;
    `scan`, which alone reads and writes the state; `finish`, what becomes of each token's output. A server compiles the
    first and the last, and runs the one in the middle on the states of many sequences. The rest is optional.

    Options are the keyword-only arguments of `__init__`, with types (`int`, `float`, `bool`, `Literal`) and,
    for numbers, `Bounds`: that signature is the single description that `--set`, recipes and docs read. A
    mechanism with **near in its signature also has `window` and `sink`.
    """

    title: ClassVar[str]
    paper: ClassVar[str]
    # Bytes of decode state of one layer and sequence, as a formula; what `state_bytes` computes.
    state_formula: ClassVar[str]
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = False
    # Whether the output is a mean with positive weights. The subclass then writes `mix_with_mass` in place of `mix`,
    # which returns (o, g, state): g [B,T,H] fp32 is the sum of the weights, above 0.
    normalised: bool = False
    # Whether it needs to know where tokens lie: its calls then come with a `grid`.
    geometric: ClassVar[bool] = False
    # Whether it needs as many keys as queries.
    square: ClassVar[bool] = True
    # Parameters that stay in fp32 in a narrower model: rounded in each round of training, decays drift. A part of a mixer
    # may have such, too.
    in_fp32: ClassVar[tuple[str, ...]] = ()
    # Whether it updates its rows of a pool of states in place. Else its caller copies the rows out, and back after it.
    pools: ClassVar[bool] = False
    mix_with_mass: Callable[..., tuple[Tensor, Tensor, Any]]
    # Options under which the mechanism behaves as published; `--set faithful=true` starts from these.
    published: ClassVar[dict[str, Any]] = {}
    # Switch -> what the other options are under it; `--set` may choose among what the mixer then still takes.
    implied: ClassVar[dict[str, dict[str, Any]]] = {}
    # Options that need such a switch.
    switched: ClassVar[tuple[str, ...]] = ()
    # Whether it takes q and k without rotary embedding, whatever its options.
    unrotated: ClassVar[bool] = False
    # Option -> what it sets, one line for `linearize mechanisms NAME`. A subclass writes those that are its own.
    about: ClassVar[dict[str, str]] = {
        "rope": "rotate q and k as the softmax model does",
        "feature_map": "function of q and k that makes their products positive",
        "value_act": "function of v",
        "state_heads": "one memory for each KV head, or for each query head",
        "norm": "RMS norm of each head's output",
        "dwc": "size of the convolution on v (0: none)",
        "output_gate": "multiply the output by swish(W x)",
        "half_life_min": "shortest half-life of the memory at the start, in tokens (0: gates as published)",
        "half_life_max": "longest half-life of the memory at the start, in tokens",
        "damping": "exponent 1/damping of the gates; larger means slower forgetting",
        "gate_std": "standard deviation of the gates' weights at the start",
        "gate_rank": "rank of the map from hidden states to gates",
        "chunk_size": "tokens in a chunk of the PyTorch path; it does not change results",
        "window": "exact softmax over this many last tokens beside the mechanism (0: none); in encoders on each side",
        "sink": "exact softmax also over this many first tokens of each document; needs a window",
    }
    # Mechanisms that the option `base` can choose. With **options in the signature the base's options count too.
    bases: ClassVar[tuple[str, ...]] = ()
    # The exact window beside a mechanism; window.py sets it, which travels only with a checkpoint that has windows.
    window_type: ClassVar[Callable[..., nn.Module] | None] = None
    # Set by attention_hooks.py: its attention function, the config that names the implementation, what its model was
    # told of places (position_hooks.py), the prefix of the implementation's name, the mechanism with its options, and
    # the names of the positional arguments of the attention module.
    attention_function: Any
    switch: Any
    position_hooks: Any
    prefix: str
    kind: str
    arguments: tuple[str, ...]

    def __init__(
        self,
        site: AttentionSite,
        rope: bool = True,
        *,
        window: Annotated[int, Bounds(0, 65536)] = 0,
        sink: Annotated[int, Bounds(0, 1024)] = 0,
    ) -> None:
        """Window and sink add (sink + window) * KV heads * (D + Dv) numbers in the model's dtype, and 8 bytes, to the
        state.

        Raises ValueError for a window where attention is bidirectional and tokens lie on no line, or rope is off, and
        for a sink without a window or, where attention is bidirectional, longer than it.
        """
        super().__init__()
        if sink and not window:
            raise ValueError(f"sink={sink}: first tokens stay exact beside a window; set window too")
        if window and not site.causal and site.grid != "line":
            raise ValueError(f"window={window}: a bidirectional window is one of text, whose tokens lie on a line. Set window=0")
        if window and not site.causal and sink > window:
            raise ValueError(f"sink={sink}: at most window={window} first tokens where attention is bidirectional")
        if window and not rope:
            raise ValueError(f"window={window}: exact attention needs the rotary embedding; set rope=true")
        self.site = site
        self.near: Any = None
        # The heads that keep softmax, of which `site` tells nothing; set by `mixer_at`.
        self.softmax: Any = None
        if window:
            assert Mixer.window_type is not None, "window.py was not imported"
            self.near = Mixer.window_type(site.hidden, site.heads, window, sink, site.scale, self.normalised)
        # Whether `mix` gets q and k without rotary embedding; read before the attention module runs.
        self.drop_rope = not rope
        # Whether `mix` gets q and k as they are in front of the norms that the attention module has for them. The
        # module then runs a second time for the student, so such a mixer gets no rotary embedding either.
        self.skip_qk_norm = False
        # What the attention hooks hand over for the duration of one call of the attention module, by thread.
        self.calls: dict[int, Any] = {}
        # The grid that the patch convolution of a site on `patches` last made, by thread.
        self.patches: dict[int, tuple[int, ...]] = {}
        # What makes the module compute fewer keys than queries, where that is dropped.
        self.reductions: dict[str, Any] = {}
        # The listener that gets the teacher's and the student's output during attention transfer.
        self.transfer: Any = None

    @property
    def seam(self) -> Any:
        """`attention_function`, by the name that files of earlier versions in this process know (interface.py)."""
        return self.attention_function

    def fp32_names(self) -> list[str]:
        """Names of the parameters that stay in fp32, by `in_fp32` of the parts."""
        return [
            f"{path}.{name}".removeprefix(".")
            for path, part in self.named_modules()
            for name in getattr(part, "in_fp32", ())
            if getattr(part, name, None) is not None
        ]

    def keep_in_fp32(self) -> None:
        """Make those parameters fp32 where they have a narrower dtype."""
        for name in self.fp32_names():
            parameter = self.get_parameter(name)
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`to` with a narrower dtype, of the model or of anything that holds it, keeps the digits of what stays in fp32.
        `half` and `bfloat16`, which come here with other functions, round everything, as some sharding needs it."""
        to = getattr(fn, "__qualname__", "").startswith("Module.to.")
        before = {name: self.get_parameter(name).data for name in self.fp32_names() * to}
        super()._apply(fn, recurse)
        for name, value in before.items():
            parameter = self.get_parameter(name)
            if parameter.dtype.itemsize < min(value.dtype.itemsize, 4):
                parameter.data = value.to(parameter.device, torch.float32)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves behind what belongs to one call, which an interrupted forward may have left."""
        return {**self.__dict__, "calls": {}, "transfer": None}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, state: Any = None
    ) -> tuple[Tensor, Any]:
        """`mix`, the exact window beside it where there is one, and softmax in the heads that keep it; arguments and
        results as for `mix`, of all heads. With rows in the layout `state` is a pool, which is changed in place and
        returned.

        Raises ValueError when a causal mechanism or window is called as bidirectional attention, for rows that do not fit,
        and for rows beside heads that keep softmax.
        """
        alone = self.softmax is None and (self.near is None or not self.site.causal)
        if not layout.causal and q.shape[1] > 1 and not (self.bidirectional and alone):
            what = "what stands beside it" if self.bidirectional else self.title
            raise ValueError(f"{self.site.path}: called as bidirectional attention, and {what} looks back only")
        if layout.rows is not None and self.softmax is not None:
            raise ValueError(
                f"{self.site.path}: the heads that keep softmax hold every token, and a row of a pool has one size. Hand "
                "in the states of the batch, without rows"
            )
        check_pool(layout.rows, state, q.shape[0], layout.segments, layout.cu_seqlens)
        if layout.cu_seqlens is not None and self.softmax is not None:
            raise ValueError(f"{self.site.path}: sequences laid end to end, and some heads keep softmax. Pass segments")
        q, k, v = as_autocast(q, k, v)
        if self.softmax is None:
            return self._forward_linear(q, k, v, x, layout, state)
        (q, own_q), (k, own_k), (v, own_v) = map(self.softmax.split, (q, k, v))
        before, held = (None, None) if state is None else state
        o, before = self._forward_linear(q, k, v, x, layout, before)
        kept, held = self.softmax.attend(own_q, own_k, own_v, layout, held)
        return self.softmax.join(o, kept), self.softmax.state(before, held)

    def _forward_linear(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, state: Any
    ) -> tuple[Tensor, Any]:
        """`forward` of the heads that the mechanism computes."""
        far, near = (state, None) if self.near is None or state is None else state
        o, mass, far = self._forward_mechanism(q, k, v, x, layout, far)
        if self.near is None:
            return o, far
        o, near = self.near(o, mass, q, k, v, x, layout, near)
        return o, None if near is None else WindowedState(far, near)

    def _forward_mechanism(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, state: Any
    ) -> tuple[Tensor, Tensor | None, Any]:
        """What the mechanism computes, its normaliser where it has one, and its state."""
        if not self.pools and (layout.rows is not None or layout.cu_seqlens is not None):
            inputs, beside = self.project(q, k, v, x, layout)
            outputs, state = self._scan_sequences(inputs, layout, state)
            return *self.finish(outputs, beside, layout), state
        if self.normalised:
            return self.mix_with_mass(q, k, v, x, layout, state)
        o, state = self.mix(q, k, v, x, layout, state)
        return o, None, state

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout, state: Any) -> tuple[Tensor, Any]:
        """Mix tokens: q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv], x [B,T,hidden] -> o [B,T,H,Dv], new state.

        `state` is None or what an earlier call returned.
        """
        inputs, beside = self.project(q, k, v, x, layout)
        outputs, state = self.scan(inputs, layout, state)
        return self.finish(outputs, beside, layout)[0], state

    def project(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout) -> tuple[Tensors, Tensors]:
        """What `scan` takes and what `finish` takes beside its results, [B,T,..] each, token by token: of `layout` it
        reads the rotation, and whether to be plain."""
        return (q, k, v, x), ()

    def scan(self, inputs: Tensors, layout: TokenLayout, state: Any) -> tuple[tuple[Tensor, ...], Any]:
        """The output o [B,T,H,Dv], the normaliser [B,T,H] beside it where there is one, and the new state."""
        q, k, v, x = inputs
        if self.normalised:
            o, mass, state = self.mix_with_mass(q, k, v, x, layout, state)
            return (o, mass), state
        if type(self).mix is Mixer.mix:
            raise NotImplementedError(f"{type(self).__name__} writes neither mix nor mix_with_mass nor scan")
        o, state = self.mix(q, k, v, x, layout, state)
        return (o,), state

    def finish(
        self, outputs: tuple[Tensor, ...], beside: Tensors, layout: TokenLayout
    ) -> tuple[Tensor, Tensor | None]:
        """o [B,T,H,Dv] and the normaliser of what `scan` returned, token by token."""
        return outputs[0], outputs[1] if len(outputs) > 1 else None

    # ------------------------------------------------------------ a whole call in three parts, as a server makes it

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: TokenLayout) -> tuple[Tensors, Tensors]:
        """`project` of a whole call: what `core` takes, and what `complete` takes beside its results."""
        inputs, beside = self.project(q, k, v, x, layout)
        if self.near is None:
            return inputs, beside
        return (*inputs, q, k, v), (*beside, self.near.logit(x))

    def core(self, inputs: Tensors, layout: TokenLayout, state: Any) -> tuple[tuple[Tensor, ...], Any]:
        """`scan` and the window's attention, with `rows` or `cu_seqlens` in the layout. Results as `empty_outputs` makes them, and
        the state; a pool is changed in place."""
        if self.near is None:
            return self._scan_sequences(inputs, layout, state)
        far, near = (None, None) if state is None else state
        q, k, v = inputs[-3:]
        outputs, far = self._scan_sequences(inputs[:-3], layout, far)
        last_results(2)
        o, mass, near = self.near.attend(q, k, v, layout, near)
        return (*outputs, o, mass), WindowedState(far, near)

    def core_into(self, outputs: tuple[Tensor, ...], inputs: Tensors, layout: TokenLayout, state: Any) -> Any:
        """`core` with its results in `outputs`, dense tensors; returns the state."""
        with results_into(outputs):
            made, state = self.core(inputs, layout, state)
        for out, y in zip(outputs, made, strict=True):
            if out.data_ptr() != y.data_ptr():
                out.copy_(y)
        return state

    def empty_outputs(self, inputs: Tensors, v: Tensor) -> tuple[Tensor, ...]:
        """Uninitialised tensors as `core` returns them for its inputs, queries [B,T,M*H,..] of all memories first, those
        of the window, where there is one, third from the end, and values v [B,T,Hkv,Dv]."""
        first, last = (inputs[i].shape[:3] for i in (0, -3))
        far = inputs[0].new_empty(*first, v.shape[-1])
        found = (far, v.new_empty(first, dtype=torch.float32)) if self.normalised else (far,)
        if self.near is None:
            return found
        return *found, v.new_empty(*last, v.shape[-1]), v.new_empty(last, dtype=torch.float32)

    def complete(self, outputs: tuple[Tensor, ...], beside: Tensors, layout: TokenLayout) -> Tensor:
        """The whole call's o [B,T,H,Dv]."""
        if self.near is None:
            return self.finish(outputs, beside, layout)[0]
        o, mass = self.finish(outputs[:-2], beside[:-1], layout)
        return self.near.blended(o, mass, *outputs[-2:], beside[-1], layout.plain)

    def _scan_sequences(self, inputs: Tensors, layout: TokenLayout, state: Any) -> tuple[tuple[Tensor, ...], Any]:
        """`scan`, also of mechanisms that update no pool in place, and know no more than one sequence a row."""
        rows, cu = layout.rows, layout.cu_seqlens
        if rows is not None and not self.pools:

            def copied(state: Any, padding: Tensor) -> tuple[tuple[Tensor, ...], Any]:
                return self.scan(inputs, layout._replace(padding=padding, rows=None), state)

            outputs, state = on_rows(copied, state, rows, layout.padding, inputs[0].shape[1])
            return outputs, state
        if cu is not None and not self.pools:

            def alone(own: slice, state: Any) -> tuple[Any, ...]:
                single = part_of(layout._replace(cu_seqlens=None), own.start, own.stop)
                outputs, state = self.scan(tuple(None if y is None else y[:, own] for y in inputs), single, state)
                return (*outputs, state)

            *parts, state = on_sequences(alone, cu, state)
            return tuple(parts), state
        return self.scan(inputs, layout, state)

    @classmethod
    def obstacle(cls, site: AttentionSite) -> str | None:
        """Why this mechanism does not fit where a site's tokens lie, as the end of a sentence; None where it does."""
        return f"its grid is not known: {site.grid_from}" if cls.geometric and site.grid == "unknown" else None

    @classmethod
    def parts(cls, site: AttentionSite, options: dict[str, Any]) -> dict[str, str]:
        """Kernel files that these options, all of them, or the site make necessary beside those that the mechanism
        imports at the top of its own: place in the kernels folder -> a name in it. A checkpoint carries no others.

        A subclass adds its own. It imports them where it needs them, with `import_module`.
        """
        found = {"window/window": "Window"} if options.get("window") else {}
        return found | ({"layers/softmax_heads": "SoftmaxHeads"} if site.softmax_groups else {})

    @classmethod
    def published_at(cls, site: AttentionSite | None) -> dict[str, Any]:
        """`published`, for papers that differ between kinds of sites."""
        return cls.published

    @classmethod
    def base_for(cls, name: str) -> type[Mixer]:
        """The mixer of a mechanism in `bases`."""
        raise TypeError(f"{cls.__name__} has no bases, and was asked for {name}")

    @classmethod
    def unused_options(cls, site: AttentionSite, flat: bool) -> dict[str, str]:
        """Options of no effect at a site, and why; `flat`: the tokens are those of a 2D grid and no others."""
        return {}

    def reset_parameters(self) -> None:
        """Write the initial value of every parameter, through `transformers.initialization` (flag-aware).

        A subclass writes its own and those of torch's layers, and calls this for those of its other parts.
        """
        for part in self.children():
            own = getattr(type(part), "reset_parameters", None)
            if own is not None and not own.__module__.startswith("torch."):  # torch's would overwrite loaded weights
                own(part)

    def state_bytes(self, tokens: int, item: int = 4) -> int:
        """Bytes of decode state per sequence after `tokens` tokens, activations having `item` bytes.

        A subclass adds its own to those of the window, and of the heads that keep softmax.
        """
        row = (self.site.key_dim + self.site.value_dim) * item
        near = 0 if self.near is None else (self.near.sink + self.near.window) * self.site.kv_heads * row + 8
        return near + (0 if self.softmax is None else tokens * len(self.softmax.groups) * row)

    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, o: Tensor, o_teacher: Tensor, layout: TokenLayout | None = None
    ) -> None:
        """Set norms or gates from one batch: what `mix` got, its output o, softmax's o_teacher. Default: the norms of
        heads give the teacher's root mean square."""
        for part in self.children():
            if isinstance(part, HeadNorm):
                part.calibrate(o_teacher)

    @torch.no_grad()
    def calibrate_all(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, o: Tensor, target: Tensor, layout: TokenLayout
    ) -> None:
        """`calibrate` and `calibrate_window`, from what `forward` got and gave, of all heads."""
        if self.softmax is not None:
            q, k, v, o, target = (self.softmax.split(y)[0] for y in (q, k, v, o, target))
        self.calibrate(q, k, v, x, o, target, layout)
        self.calibrate_window(q, k, v, x, target, layout)

    @torch.no_grad()
    def calibrate_window(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, target: Tensor, layout: TokenLayout) -> None:
        """After `calibrate`: set the mechanism's share beside the window, and the scale of its output."""
        if self.near is not None:
            q, k, v = as_autocast(q, k, v)
            far, mass, _ = self._forward_mechanism(q, k, v, x, layout, None)
            norm = next((part for part in self.modules() if isinstance(part, HeadNorm)), None)
            factor = self.near.calibrate(far, mass, q, k, v, target, layout, free=norm is not None)
            if norm is not None:
                norm.weight.unflatten(0, (-1, len(factor))).mul_(factor[:, None])


# Feature maps with weights, which have kernels of their own.
LEARNED = ("relu", "hedgehog")


def feature_parts(kind: str) -> dict[str, str]:
    """`Mixer.parts` of a feature map that features.py makes; none for another."""
    if kind not in ("elu", "relu", "plain_relu", "hedgehog"):
        return {}
    return {"layers/features": "Features"} | ({"layers/learned_maps": "learned_map"} if kind in LEARNED else {})


def output_gate_at(site: AttentionSite, wanted: bool) -> Any:
    """The gate on the output of a mixer at `site` (output_gate.py); None where none is wanted."""
    if not wanted:
        return None
    gate = import_module(".layers.output_gate", __package__).OutputGate
    return gate(site.hidden, site.heads, site.value_dim)


def gated(o: Tensor, x: Tensor, gate: nn.Module | None) -> Tensor:
    """o [B,T,heads,dim] in its dtype, gated by swish(gate(x)) of hidden states x [B,T,hidden] where there is a gate.

    Others may have put a layer of their own in its place: PEFT adapts it, bitsandbytes packs its weight.
    """
    return o if gate is None else o * F.silu(gate(x)).unflatten(-1, o.shape[2:]).to(o.dtype)


def check_power_of_two(**options: int) -> None:
    """Raise ValueError, naming the option, unless every value is a power of two."""
    for name, value in options.items():
        if value & (value - 1):
            raise ValueError(f"{name}={value}: must be a power of two")


def check_half_lives(shortest: float, longest: float) -> None:
    """Raise ValueError unless half_life_min <= half_life_max."""
    if longest < shortest:
        raise ValueError(f"half_life_max={longest}: must be >= half_life_min={shortest}")


def check_implied(switch: str, implied: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise ValueError, naming all of them, for `options` that are not as `switch` implies."""
    wrong = {name: value for name, value in options.items() if value != implied[name]}
    if wrong:
        given, needed = (", ".join(f"{name}={y[name]}" for name in wrong) for y in (wrong, implied))
        raise ValueError(f"{given}: {switch}=true needs {needed}")


def as_autocast(*inputs: Tensor) -> list[Tensor]:
    """Cast the inputs as autocast casts those of scaled_dot_product_attention: to its dtype, except float64.

    Rotary embedding of weights in fp32 leaves q and k in fp32 beside v in bf16, which no kernel takes.
    """
    device = inputs[0].device.type
    # is_autocast_available would tell, too; torch.compile of torch 2.11 stops at it, in every layer.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return [*inputs]
    return [x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in inputs]


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off where it is on, which would run float32 sums in half precision; the meta device has no autocast.

    Where it is off nothing is entered: vLLM cannot split a graph at a context.
    """
    inside = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if inside else nullcontext()


def mixer_at(kind: type[Mixer], site: AttentionSite, options: dict[str, Any]) -> Mixer:
    """The mixer of a site: of all its heads, or of those beside `softmax_groups`, which keep softmax.

    Raises ValueError for options that do not fit together, and for groups that are not there, all groups, bidirectional
    attention and mechanisms that get q and k without the rotary embedding.
    """
    groups = site.softmax_groups
    if not groups:
        return kind(site, **options)
    if not site.causal:
        raise ValueError("this attention is bidirectional; heads keep softmax where it looks back only")
    if not {*groups} < {*range(site.kv_heads)}:
        raise ValueError(f"softmax in KV heads {[*groups]} of {site.kv_heads}: they must exist, and leave others")
    if options.get("rope") == "auto":
        options = options | {"rope": "before"}  # softmax needs q and k as the softmax model has them
    mixer: Mixer = kind(site.linear_part(), **options)
    if mixer.drop_rope:
        usual = "true" if isinstance(options.get("rope"), bool) else "before"
        raise ValueError(f"heads that keep softmax need the rotary embedding in front of features; set rope={usual}")
    softmax_heads = import_module(".layers.softmax_heads", __package__).SoftmaxHeads
    mixer.softmax = softmax_heads(site.heads, site.kv_heads, tuple(sorted(groups)), site.scale)
    return mixer


def own_mixer(module: Any) -> type[Mixer]:
    """The one Mixer subclass that the Python module `module` itself defines (not what it imports)."""
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Mixer) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__name__} must define exactly one Mixer subclass, found {len(found)}")
    return found[0]


def option_types(mixer: type[Mixer], base: str | None = None) -> dict[str, tuple[Any, Bounds | None, Any]]:
    """Options of a mechanism, in order: name -> (type, bounds or None, default).

    Behind **options in its signature stand those of Mixer or, where it has bases, of `base` (None: the default one),
    except what it has an option for itself.
    """
    hints = typing.get_type_hints(mixer.__init__, include_extras=True)
    options, parameters = {}, inspect.signature(mixer.__init__).parameters
    for name, parameter in parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        kind, bounds = hints[name], None
        if typing.get_origin(kind) is typing.Annotated:
            kind, bounds = typing.get_args(kind)
        options[name] = (kind, bounds, parameter.default)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        owner = mixer.base_for(base or options["base"][2]) if mixer.bases else Mixer
        # A switch of the base names a whole layer, around which nothing else stands.
        taken = {*options, *owner.implied, *owner.switched}
        options |= {name: described for name, described in option_types(owner).items() if name not in taken}
    return options


def positions(padding: Tensor | None, segments: Tensor | None, seen: Tensor | int, shape: tuple[int, int]) -> Tensor:
    """Index of each token within its own document, counting real tokens only: [B,T] int64.

    `seen` (a number or [B]) is how many tokens of the first document the state has absorbed. Padding repeats the index of the token
    before it, so left padding does not shift a row.
    """
    B, T = shape

    def made() -> Tensor:
        if padding is None:
            device = segments.device if segments is not None else seen.device if isinstance(seen, Tensor) else None
            index = earlier = torch.arange(T, device=device).expand(B, T)
        else:
            real = padding.long()
            index = real.cumsum(1) - 1
            earlier = index + 1 - real  # real tokens before each: a document may begin with padding
        if segments is not None:
            starts = torch.ones_like(segments, dtype=torch.bool)
            starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
            index = index - torch.where(starts, earlier, 0).cummax(1).values
        before = seen[:, None] if isinstance(seen, Tensor) else seen
        if segments is None or (isinstance(seen, int) and seen == 0):
            return index + before
        return index + before * (segments == segments[:, :1])

    return once(segments if padding is None and not isinstance(seen, Tensor) else None, ("positions", seen), made)
