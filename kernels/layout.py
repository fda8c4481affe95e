"""Which of a call's new tokens are real, where they lie, and where packed documents begin, as transformers tells it.

Letters: B batch, T new tokens. Masks are the caller's 2D padding mask or the 4D mask of a softmax backend.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils.import_utils import is_tracing

# Whichever thread it was.
LAST = -1

# What to do with a mask that only softmax can follow.
_OWN_MASK = (
    "Linear layers follow a mask of one's own as far as it keeps documents apart or hides padding, the same for all "
    "heads and without a bias. Pass the 2D padding mask, or position_ids that restart with each document"
)

# How the mask that an architecture made differs from its linear layer, by whether that is causal.
_DIRECTIONS = {
    True: "this call lets tokens see later ones, such as those of an image or of a prefix, and its linear layer looks "
    "back only",
    False: "this call hides later tokens from earlier ones, and its linear layer is bidirectional",
}
_OTHER_DIRECTION = (
    "The architecture makes such a mask for token_type_ids, images or prefixes. Pass text without them, or keep softmax "
    "in the layers that get it (convert --keep-softmax). `with model.teacher():` computes what the source does"
)

# How PEFT's layers know that they are off.
ADAPTER_FLAG = "_disable_adapters"

Made = TypeVar("Made")
# By tensor, the version of it and what was made of that; an entry goes when its tensor does.
made_of: Any = WeakTensorKeyDictionary()


def once(tensor: Tensor | None, key: Hashable, make: Callable[[], Made]) -> Made:
    """What `make` gives, made once while `tensor` lives unchanged: all layers of a pass see the same documents.

    It must follow from `tensor` and `key` alone, hold no reference to `tensor`, and be changed by nobody. Nothing is kept
    for None, while a graph is recorded, and of tensors that do not tell when they change. A tensor with a dict `memo` keeps
    there what was made, and a tensor that was made of it does the same: the promise of a server, or of one who records a
    CUDA graph, that the tensor belongs to one pass, and that all layers call with it after the same number of tokens.
    """
    if tensor is None or torch.compiler.is_compiling():
        return make()
    memo = getattr(tensor, "memo", None) if isinstance(tensor, Tensor) else None
    if memo is not None:
        if key not in memo:
            memo[key] = made_now = make()
            if isinstance(made_now, Tensor):
                made_now.memo = {}  # type: ignore[attr-defined]
        found: Made = memo[key]
        return found
    if is_tracing(tensor):
        return make()
    if tensor.is_inference() or torch.is_inference_mode_enabled():
        return make()
    version, made = made_of.get(tensor, (None, {}))
    if version != tensor._version:
        made = {}
        made_of[tensor] = tensor._version, made
    if key not in made:
        made[key] = make()
    return made[key]


def of_starts(cu: Tensor, key: Hashable, make: Callable[[Tensor], Made]) -> Made:
    """make(cu) of the starts of sequences, kept as `once` keeps it. A server's starts have a twin on the CPU, `cu.host`.
    Then make(cu.host) is copied: its dozens of small steps take less time there than launches for a GPU."""

    def made() -> Made:
        host = getattr(cu, "host", None)
        return make(cu) if host is None else _copied(make(host), cu.device)

    return once(cu, key, made)


def in_pass(cu: Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
    """What `make` gives of the starts of sequences and of the tokens that their states have seen, kept where the starts
    belong to one pass (`memo`). A caller's own may come again with other states."""
    return once(cu if hasattr(cu, "memo") else None, key, make)


def _copied(made: Any, device: torch.device) -> Any:
    """Tensors of a tuple, or one, on a device. From memory that is not pinned a GPU's driver may wait for its stream."""
    if isinstance(made, Tensor):
        return (made.pin_memory() if device.type == "cuda" else made).to(device, non_blocking=True)
    if not isinstance(made, tuple):
        return made
    parts = [_copied(part, device) for part in made]
    return type(made)(*parts) if hasattr(made, "_fields") else tuple(parts)


def is_traced(tensor: Tensor) -> bool:
    """`is_tracing`, but for a CUDA graph that is recorded: there Python runs as always, and only waiting is forbidden."""
    if torch.compiler.is_compiling() or not is_tracing(tensor):
        return is_tracing(tensor)
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def this_thread() -> int:
    """Forward passes of one model in several threads keep apart; a compiled pass keeps nothing in Python."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def check_thread(owner: int | None) -> None:
    """`owner` is the thread in which a model runs as its teacher; None: no thread. Raises RuntimeError in another one,
    whose layers would be switched, too. Autograd may compute checkpointed layers again in any thread, and a compiled
    pass does not look.
    """
    if torch.compiler.is_compiling() or owner in (None, threading.get_ident()):
        return
    if torch._C._current_graph_task_id() == -1:  # no backward pass runs here
        raise RuntimeError(
            "another thread is inside teacher() of this model, which switches its layers for all threads. Call the "
            "model when that is over, or load it a second time"
        )


@contextmanager
def adapters(model: Any, *, enabled: bool) -> Iterator[None]:
    """Within: PEFT's adapters in a model are on, or off."""
    layers: list[Any] = [m for m in model.modules() if hasattr(type(m), ADAPTER_FLAG) or ADAPTER_FLAG in vars(m)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        # The flag alone: PEFT's own switch would also change which parameters have gradients.
        layer._disable_adapters = not enabled
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


class Grid(NamedTuple):
    """Where the T tokens of a row lie: `prefix` tokens without a place (a class token, registers), then those of a
    grid of `size` (T,), (h, w) or (t, h, w) in raster order, then `suffix` more without a place.
    """

    size: tuple[int, ...]
    prefix: int = 0
    suffix: int = 0

    @property
    def tokens(self) -> int:
        """T."""
        return self.prefix + math.prod(self.size) + self.suffix


class TokenLayout(NamedTuple):
    """What a mixer is told of the T tokens of a call.

    `padding` [B,T] bool is True at real tokens (None: all are). `segments` [B,T] int numbers packed documents (None:
    one a row); without `causal`, tokens of one number see each other wherever they are. `grid` is where tokens lie, for
    a mixer that asks (None: on a line). `rotation` is the rotary embedding that was taken away from q and k: rotary.py's
    Rotation, for a mixer that puts it elsewhere. `scores` is what the source's softmax does to its scores:
    softmax_heads.py's ScoreOptions, where some heads keep it. With `rows` [B] int the state is a pool, of which those
    rows are the call's; they are changed in place (layers/pool.py). With `cu_seqlens` [S+1] int32 the one row (B=1) is S
    sequences laid end to end, and the state has S rows. `places` [B,T] int64 is the index of each token in its document,
    where the caller knows it. `plain` leaves steps without a state to PyTorch, for torch.compile to fuse.
    """

    padding: Tensor | None = None
    segments: Tensor | None = None
    causal: bool = True
    grid: Grid | None = None
    rotation: Any = None
    scores: Any = None
    rows: Tensor | None = None
    cu_seqlens: Tensor | None = None
    places: Tensor | None = None
    plain: bool = False


def part_of(layout: TokenLayout, start: int, stop: int) -> TokenLayout:
    """The layout of tokens `start` to `stop` of a causal call, which lie on a line."""
    padding, segments = (None if x is None else x[:, start:stop] for x in (layout.padding, layout.segments))
    grid = None if layout.grid is None else Grid((stop - start,))
    rotation = layout.rotation and type(layout.rotation)(*(part[:, start:stop] for part in layout.rotation))
    return layout._replace(padding=padding, segments=segments, grid=grid, rotation=rotation)


def joined(layouts: Sequence[TokenLayout], inputs: Sequence[Tensor]) -> TokenLayout:
    """The layout of causal calls as one call, each of which went on with the state of the one before; `inputs` [B,T,..]
    are one of each."""
    if len(layouts) == 1:
        return layouts[0]
    B, T = len(inputs[0]), sum(x.shape[1] for x in inputs)
    padding, segments = [one.padding for one in layouts], [one.segments for one in layouts]
    real: Tensor | None = None
    documents: Tensor | None = None
    rotation: Any = None
    if any(part is not None for part in padding):
        parts = zip(padding, inputs, strict=True)
        real = torch.cat([x.new_ones(x.shape[:2], dtype=torch.bool) if y is None else y for y, x in parts], 1)
    if any(part is not None for part in segments):
        # A call goes on in the last document of the one before.
        numbers = [x.new_zeros(x.shape[:2]) if y is None else y for y, x in zip(segments, inputs, strict=True)]
        documents = torch.cat([F.pad(y[:, 1:] != y[:, :-1], (1, 0)) for y in numbers], 1).cumsum(1)
    if layouts[0].rotation is not None:
        turned = zip(*(one.rotation for one in layouts), strict=True)
        rotation = type(layouts[0].rotation)(*(torch.cat([x.expand(B, -1, -1) for x in part], 1) for part in turned))
    grid = None if layouts[0].grid is None else Grid((T,))
    return layouts[-1]._replace(padding=real, segments=documents, grid=grid, rotation=rotation)


class Geometry(NamedTuple):
    """What a call says of the places of its tokens: the grid, if its mixer asks; whether it is one of windows; the
    regions [B,T] of shifted ones.
    """

    grid: Grid | None
    windows: bool
    regions: Tensor | None


def call_layout(
    geometry: Geometry, causal: bool, mask: Any, shape: tuple[int, int], seen: int | None, kwargs: dict[str, Any]
) -> TokenLayout:
    """`token_layout` of a call; in windows all tokens are real, and regions are what documents are elsewhere."""
    padding, segments = (
        (None, geometry.regions) if geometry.windows else token_layout(mask, shape, seen, kwargs, causal)
    )
    return TokenLayout(padding, segments, causal, geometry.grid)


def token_layout(
    mask: Tensor | None, shape: tuple[int, int], seen: int | None, kwargs: dict[str, Any], causal: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Padding [B,T] bool (None: all real) and document numbers [B,T] int64 (None: one document a row).

    `seen` is how many tokens a cache holds already (None: no cache); `kwargs` are those of the attention function.
    Documents follow what names them (`named_documents`), else the restarts of `position_ids`. With a 2D mask or a cache
    those restarts mean nothing and transformers ignores them, but that flash attention (`kwargs["flash"]`) finds them in
    one row with an empty cache; a 4D mask may come from packing or from padding. One that the
    caller made (`kwargs["own_mask"]`) is all that counts, as for softmax; `read_mask` says which there can be.
    Raises ValueError for a 2D mask of another length (`check_columns`).
    """
    B, T = shape
    if kwargs.get("own_mask") and isinstance(mask, Tensor) and mask.ndim == 4:
        given = mask
        how = causal, seen or 0, kwargs.get("sliding_window")
        return once(given, ("own mask", B, T, *how), lambda: read_mask(given, (B, T), *how))
    check_columns(mask, T, seen)
    padding = None if mask is None or hasattr(mask, "hides_none") else token_padding(mask, B, T, seen or 0)
    documents, positions = named_documents(kwargs, shape), kwargs.get("position_ids")
    if documents is not None:
        return padding, documents
    masked = mask is not None and mask.ndim == 2
    found = kwargs.get("flash", False) and seen == 0 and mask is None and B == 1
    if positions is None or positions.ndim != 2 or masked or not (seen is None or found) or T == 1:
        return padding, None
    alone = positions if padding is None else None
    numbers = once(alone, ("documents", B, T), lambda: document_numbers(positions, padding).expand(B, T))
    # generate() gives positions of one document always, which needs no numbers.
    one = found and not is_traced(numbers) and once(alone, ("one document", T), lambda: not bool(numbers.any()))
    return padding, None if one else numbers


def named_documents(kwargs: dict[str, Any], shape: tuple[int, int]) -> Tensor | None:
    """Document numbers [B,T] int64 by what names the documents of a call; None where nothing does.

    `cu_seq_lens_q` [documents+1] has their bounds among the B*T tokens, row after row; what lies behind the last bound
    is one document more. `seq_idx` [B or 1,T] has a number for each token, and another number begins a document.
    Raises ValueError for bounds of another number of rows, and for a `seq_idx` of another length.
    """
    B, T = shape
    cu, numbers = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if cu is not None:
        if B > 1:  # flash attention puts the rows one behind the other, too
            message = (
                f"cu_seq_lens_q must end at {B * T} for {B} rows of {T} tokens: its bounds count through all rows. Put "
                "the documents into one row, or pass position_ids that restart with each document"
            )
            if is_tracing(cu):
                torch._assert_async(cu[-1] == B * T, message)
            elif once(cu, ("end", B, T), lambda: int(cu[-1]) != B * T):
                raise ValueError(f"{message}. It ends at {int(cu[-1])}")

        def counted() -> Tensor:
            index = torch.arange(B * T, device=cu.device)
            return torch.bucketize(index, cu[1:].to(index.dtype), right=True).view(B, T)

        return once(cu, ("documents", B, T), counted)
    if numbers is None:
        return None
    if numbers.ndim != 2 or numbers.shape[0] not in (1, B) or numbers.shape[1] != T:
        raise ValueError(f"seq_idx {[*numbers.shape]} must be [{B},{T}]: the number of each token's document")

    def numbered() -> Tensor:
        return F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0)).long().cumsum(1).expand(B, T)

    return once(numbers, ("documents", B, T), numbered)


def call_geometry(mixer: Any, x: Tensor, bound: dict[str, Any]) -> Geometry:
    """The geometry of a call on x [B,T,hidden]; `bound` has the arguments of the attention module by name."""
    grid = call_grid(mixer.site, x.shape[1], bound, mixer.patches) if mixer.geometric else None
    windows = mixer.site.grid == "window"
    return Geometry(grid, windows, window_regions(bound.get("attention_mask"), x.shape[0]) if windows else None)


def call_grid(site: Any, T: int, bound: dict[str, Any], patches: dict[int, tuple[int, ...]]) -> Grid:
    """Where the T tokens of a call lie, by what its site says (mixer.py), the arguments of the attention module in
    `bound`, and the `patches` that its convolution noted, by thread.

    Raises RuntimeError when the tokens are not those of the grid and its prefix and suffix.
    """
    if site.grid == "patches":
        # A checkpointed layer may run again in a thread of autograd's.
        size = patches.get(this_thread(), patches[LAST])
    elif site.grid == "arguments":
        size = (bound["height"], bound["width"])
    elif site.grid == "window":
        size = (math.isqrt(T), math.isqrt(T))
    else:
        size = (T - site.prefix - site.suffix,)
    grid = Grid(size, site.prefix, site.suffix)
    if grid.tokens != T:
        raise RuntimeError(f"{site.path}: {T} tokens are not {grid}. Images of two sizes between forward and backward?")
    return grid


def window_regions(mask: Tensor | None, B: int) -> Tensor | None:
    """Regions of shifted windows, which must not meet: [B,T] int64 from 0 in each window; None where all may meet.

    `mask` [windows,T,T] is 0 where two tokens of a window may meet; the B rows are images times windows.
    """
    if mask is None:
        return None
    first = (mask == 0).int().argmax(-1)  # of each token's region
    place = torch.arange(mask.shape[-1], device=mask.device)
    number = (first == place).long().cumsum(-1) - 1
    return number.gather(-1, first).repeat(B // len(mask), 1)


def reduce_keys(module: Any, reductions: dict[str, Any], on: bool) -> None:
    """Let an attention module compute fewer keys than queries as its architecture does, or a key for each.

    `reductions` has the attributes that say so, with the architecture's values: a ratio, or a switch.
    """
    for name, value in reductions.items():
        setattr(module, name, value if on else False if value is True else 1)


def watch_patches(convolution: Any) -> dict[int, tuple[int, ...]]:
    """Where a patch convolution notes, by thread, the grid of patches that it made last."""
    if not hasattr(convolution, "linearize_patches"):
        convolution.linearize_patches = {}
        convolution.register_forward_hook(note_patches)
    return convolution.linearize_patches


def note_patches(convolution: Any, args: tuple[Any, ...], output: Tensor) -> None:
    """Forward hook of a patch convolution [B,C,..] -> [B,hidden,t,h,w] or [B,hidden,h,w]: note the grid it made."""
    convolution.linearize_patches[this_thread()] = convolution.linearize_patches[LAST] = tuple(output.shape[2:])


def document_numbers(positions: Tensor, padding: Tensor | None) -> Tensor:
    """A document starts where the position does not go on from the real token before: [B,T] int64.

    The positions of padding are filler (left padding counts 0, 0, 0, 1, ..).
    """
    if padding is None:
        return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).long().cumsum(-1)
    place = torch.arange(positions.shape[1], device=positions.device)
    last = F.pad(torch.where(padding, place, -1).cummax(1).values[:, :-1], (1, 0), value=-1)
    due = positions.expand_as(last).gather(1, last.clamp_min(0)) + 1
    return (padding & (last >= 0) & (positions != due)).long().cumsum(-1)


def token_padding(mask: Tensor, B: int, T: int, seen: int) -> Tensor:
    """Which of the T new tokens are real, [B,T] bool: the end of a 2D mask, the diagonal of a 4D one.

    Some open the rows of left padding, which are hidden from all, to all columns, so that softmax has something to add
    up. Such a token sees the last one, and the last one does not see it.
    Raises NotImplementedError for masks that are no tensor.
    """
    if not isinstance(mask, Tensor):
        name = type(mask).__name__
        raise NotImplementedError(f'{name} has no diagonal to read. Load the model with attn_implementation="sdpa"')
    if mask.ndim == 2:
        return mask[:, -T:].bool()
    if mask.shape[-2] == 1:  # one row for all queries
        mask = mask.expand(-1, -1, T, -1)
    new = new_block(mask, T, seen)
    opened = shown(mask[:, 0, :, -1]) & ~shown(new[:, -1])
    return (shown(new.diagonal(dim1=-2, dim2=-1)) & ~opened).expand(B, T)


def new_block(mask: Tensor, T: int, seen: int) -> Tensor:
    """Of a mask [B,heads,T,S] the columns of the new tokens, [B,T,T], for the first head. A static cache has more
    columns than tokens `seen` so far, a sliding one fewer."""
    start = min(mask.shape[-1] - T, seen)
    return mask[:, 0, :, start : start + T]


def shown(mask: Tensor) -> Tensor:
    """A mask as bool: some hide by -10000, others by the lowest number."""
    return mask > -5000.0 if mask.is_floating_point() else mask.bool()


def check_columns(mask: Any, T: int, seen: int | None) -> None:
    """Raise ValueError for a 2D padding mask with another number of columns than tokens: those of the call, or those
    `seen` by a cache and the call's. With a cache the columns of its first tokens may be left out, as flash attention
    does under a sliding window.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or T <= mask.shape[-1] <= T + (seen or 0):
        return
    held = f" after {seen} in the cache" if seen else ", and no cache holds tokens before them"
    raise ValueError(
        f"attention_mask {[*mask.shape]} has {mask.shape[-1]} columns for {T} tokens{held}. Pass one column for each "
        "token: of the cache, if there is one, and of the call"
    )


def is_own_mask(mask: Any) -> bool:
    """Whether the caller of a model made its mask: one of 3 or 4 dimensions, or several by the kind of layer, that
    transformers did not make from a 2D mask (`of_transformers`)."""
    if isinstance(mask, dict):
        return any(map(is_own_mask, mask.values()))
    return isinstance(mask, Tensor) and mask.ndim > 2 and not hasattr(mask, "of_transformers")


def check_direction(site: Any, mask: Any, T: int, seen: int | None, causal: bool) -> None:
    """Raise ValueError where a 4D mask of transformers' differs for T > 1 new tokens from what the linear layer of `site`
    sees: later ones in a causal layer; in a bidirectional one, a token that is not seen by one that it sees.

    `of_transformers` of a mask says how it was asked for. Where that is missing or another direction than the layer's,
    as on another device and in compiled graphs, the mask itself is read; a compiled graph asserts it.
    """
    asked = getattr(mask, "of_transformers", "mixed")
    if not isinstance(mask, Tensor) or mask.ndim != 4 or T == 1 or asked == ("causal" if causal else "bidirectional"):
        return
    if mask.shape[-2] != T:  # one row for all queries
        return
    message = f"{_DIRECTIONS[causal]}. {_OTHER_DIRECTION}"
    if is_tracing(mask):  # a path that was read would have torch.compile compile each layer for its own
        torch._assert_async(~_other_direction(mask, T, seen or 0, causal), message)
    elif once(mask, ("direction", T, seen, causal), lambda: bool(_other_direction(mask, T, seen or 0, causal))):
        raise ValueError(f"{site.path}: {message}")


def _other_direction(mask: Tensor, T: int, seen: int, causal: bool) -> Tensor:
    """Whether [] bool the new tokens of a mask [B,heads,T,S] see otherwise, as `check_direction` says."""
    new = shown(new_block(mask, T, seen))
    real = token_padding(mask, len(mask), T, seen) if causal else new.diagonal(dim1=-2, dim2=-1)
    wrong = new.triu(1) if causal else new != new.transpose(1, 2)
    return (wrong & real[:, :, None] & real[:, None]).any()


def read_mask(
    mask: Tensor, shape: tuple[int, int], causal: bool, seen: int, window: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """Padding [B,T] bool and document numbers [B,T] int64 of a caller's mask [B or 1,heads,T,S]; None where all tokens
    are real, where a row is one document.

    Its last T columns are the new tokens, those before them the `seen` ones of a cache. It is True, or 0 where it is
    added to scores, where a token may see another. A token that does not see itself is padding. Linear layers can do
    this: documents, where a token sees those of its own before it (without `causal`, all of its own), and padding. A
    sliding `window` of the layer's own is let through, as it is from the config.

    Raises ValueError for anything else. It waits for the GPU to know; a compiled graph asserts it.
    """
    (B, T), S = shape, mask.shape[-1]
    visible = shown(mask)
    same = (visible == visible[:, :1]).all()  # for all heads
    if mask.is_floating_point():
        same = same & ((mask == 0) | ~visible).all()
    seen = min(seen, max(S - T, 0))
    visible = visible[:, 0, :, : seen + T].expand(B, T, -1)
    before, new = visible[..., :seen], visible[..., seen:]
    if new.shape[-1] != T:
        raise ValueError(f"attention_mask {[*mask.shape]} has {S} columns for {T} new tokens. {_OWN_MASK}")
    real, place = new.diagonal(dim1=-2, dim2=-1).clone(), torch.arange(T, device=mask.device)
    if causal:
        last = F.pad(torch.where(real, place, -1).cummax(1).values[:, :-1], (1, 0), value=-1)
        joined = new.gather(2, last.clamp_min(0)[..., None])[..., 0]
        segments = (real & (last >= 0) & ~joined).long().cumsum(1)
    else:
        first = (new & real[:, None]).int().argmax(-1)  # that each token sees
        segments = ((first == place).long().cumsum(1) - 1).clamp_min(0).gather(1, first)
    distance = place[:, None] - place
    expected = (segments[:, :, None] == segments[:, None]) & real[:, None]
    expected = expected & (distance >= 0) if causal else expected
    hidden = expected & ~new if window is None else expected & ~new & (distance < window)
    wrong = ((new & ~expected) | hidden).any(-1)
    if seen:
        # The state goes on in the first document alone, whose tokens all see the same of what came before.
        held = before.gather(1, real.int().argmax(1)[:, None, None].expand(-1, 1, seen))
        wrong = wrong | ~held.any(-1)
        if window is None:
            wrong = wrong | (before != (held & (segments == 0)[..., None])).any(-1)
    fits = same & ~(wrong & real).any()
    if is_tracing(mask):
        torch._assert_async(fits, f"attention_mask: {_OWN_MASK}")
        return real, segments
    if not bool(fits):
        later = bool((new & (place > place[:, None]) & real[..., None]).any())
        what = "lets tokens see later ones" if causal and later else "is neither of documents nor of padding"
        raise ValueError(f"attention_mask {[*mask.shape]} {what}. {_OWN_MASK}")
    return None if bool(real.all()) else real, segments if bool((segments != segments[:, :1]).any()) else None


def mark_unpadded(mask: Tensor | None, queries: int | None) -> Tensor | None:
    """The 2D padding mask of a call with so many new tokens; one that hides none as a view that says so, for
    `token_layout` in every layer. As transformers does for softmax, it waits for the GPU to know."""
    if mask is None or mask.ndim != 2 or queries == 1 or mask.is_meta or is_tracing(mask) or not bool(mask.all()):
        return mask
    view: Any = mask[:]
    view.hides_none = True
    return view


def is_causal(module: nn.Module, kwargs: dict[str, Any], otherwise: bool) -> bool:
    """What the architecture says for this call, else for this module, else what was seen of it at conversion."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", otherwise) if given is None else given)
