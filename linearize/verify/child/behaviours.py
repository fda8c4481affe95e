"""Checks of a model in the clean process: every way to split a forward pass gives the same result.

`linearize verify` copies this folder to a clean process, calls `main` there with the arguments FOLDER DTYPE LENGTH
LIMIT, and reads the JSON that it prints. Nothing outside this folder may be imported here.

Letters: B batch, T tokens, V vocabulary. Each check returns the largest difference over the largest logit, or None
where the model has no such thing. A check that fails is repeated with softmax switched on: what the source does not
do either (packing without position_ids, say) is not held against the mixers. A check that raises never passes: it
has failed, or is skipped where softmax raises the same.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .inputs import (
    auto_class,
    cache_of,
    difference,
    make_inputs,
    make_tokens,
    proof_length,
    reach_of,
    taller_images,
    tokens_of,
    with_cache,
    writes_text,
)

STEPS = 6
# The shortest rows that can be cut up in all the ways below.
SHORTEST = STEPS + 2


def cut(length: int, wanted: list[int]) -> list[int]:
    """`length` tokens in pieces of the sizes `wanted`, as far as they go, and the rest; none is empty."""
    sizes: list[int] = []
    for size in [*wanted, length]:
        sizes.append(min(size, length - sum(sizes)))
    return [size for size in sizes if size]


def positions(mask: Tensor) -> Tensor:
    """Positions as generate() makes them from a padding mask [B,T]."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def call(model: Any, ids: Tensor, **arguments: Any) -> Any:
    """One forward pass; position_ids only where the model takes them."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        arguments.pop("position_ids", None)
    with torch.no_grad():
        return model(input_ids=ids, **{"use_cache": False, **arguments})


def pieces(model: Any, ids: Tensor, lengths: list[int]) -> Tensor:
    """Logits [B,T,V] of `ids` taken in pieces through one cache."""
    cache, found = None, []
    for part in ids.split(lengths, 1):
        out = call(model, part, use_cache=True, **with_cache(model, cache))
        cache = cache_of(out)
        found.append(out.logits)
    return torch.cat(found, 1)


# ---------------------------------------------------------------- the checks


def steps(model: Any, ids: Tensor) -> float:
    """A prefill and single steps are one forward pass."""
    T = ids.shape[1]
    return difference(pieces(model, ids, [T - STEPS] + [1] * STEPS), call(model, ids).logits)


def chunks(model: Any, ids: Tensor) -> float:
    """Neither the chunk size of the mixers nor that of the prefill matters."""
    T, whole = ids.shape[1], call(model, ids).logits
    worst = difference(pieces(model, ids, cut(T, [5, T // 3, 1])), whole)
    own = {part: part.chunk_size for name, part in model.named_modules() if name.endswith(".mixer") and sized(part)}
    for size in (16, 32, 128):
        for part in own:
            part.chunk_size = size
        worst = max(worst, difference(call(model, ids).logits, whole))
    for part, size in own.items():
        part.chunk_size = size
    return worst


def sized(part: Any) -> bool:
    return isinstance(getattr(part, "chunk_size", None), int)


def padding(model: Any, ids: Tensor, left: bool, places: bool = True) -> float:
    """Rows of a padded batch, continued by one step, are the rows alone. `places`: position_ids are given."""
    B, T = ids.shape
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 4, T - 5)):
        mask[row, slice(0, pad) if left else slice(T - pad, T)] = 0
    real = mask.bool()
    given = {"position_ids": positions(mask)} if places else {}
    batch = call(model, ids, attention_mask=mask, use_cache=True, **given)
    longer, last = torch.cat([mask, torch.ones_like(mask[:, :1])], 1), make_tokens(model, B, 1)
    given = {"position_ids": positions(longer)[:, -1:]} if places else {}
    cache = cache_of(batch)
    step = call(model, last, attention_mask=longer, use_cache=True, **with_cache(model, cache), **given)
    worst = 0.0
    for row in range(B):
        alone = call(model, torch.cat([ids[row : row + 1, real[row]], last[row : row + 1]], 1)).logits[0]
        worst = max(worst, difference(torch.cat([batch.logits[row, real[row]], step.logits[row]]), alone))
    return worst


def left_padding_alone(model: Any, ids: Tensor) -> float | None:
    """The padding mask is enough: positions follow from it."""
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    return padding(model, ids, left=True, places=False) if takes_positions else None


def packed(model: Any, ids: Tensor) -> float | None:
    """Documents in one row, told by positions that restart, are the documents one by one."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    lengths = cut(ids.shape[1], [7, 1, ids.shape[1] // 2])
    places = torch.cat([torch.arange(n) for n in lengths])[None].expand(len(ids), -1)
    apart = torch.cat([call(model, part).logits for part in ids.split(lengths, 1)], 1)
    return difference(call(model, ids, position_ids=places).logits, apart)


def beams(model: Any, ids: Tensor) -> float:
    """States follow their beams: after a reorder, and in beam search with a cache and without."""
    order = torch.tensor([2, 0, 0])
    cache = cache_of(call(model, ids, use_cache=True))
    cache.reorder_cache(order)
    last = make_tokens(model, len(ids), 1)
    step = call(model, last, use_cache=True, **with_cache(model, cache)).logits
    worst = difference(step, call(model, torch.cat([ids[order], last], 1)).logits[:, -1:])
    found = [generate(model, ids[:2, :9], num_beams=3, use_cache=cached).sequences_scores for cached in (True, False)]
    return max(worst, difference(*found))


def generate(model: Any, ids: Tensor, **arguments: Any) -> Any:
    """generate() without chance, for exactly STEPS new tokens."""
    settings = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "return_dict_in_generate": True}
    pad = model.config.get_text_config().pad_token_id
    settings |= {"output_logits": True, "output_scores": True, "pad_token_id": pad if isinstance(pad, int) else 0}
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **settings, **arguments})


def greedy(model: Any, ids: Tensor) -> float:
    """generate() of a left-padded batch computes what one pass over its result computes."""
    ids = ids[:2, :13].clone()
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    out = generate(model, ids, attention_mask=mask)
    longer = torch.cat([mask, mask.new_ones(2, STEPS - 1)], 1)
    whole = call(model, out.sequences[:, :-1], attention_mask=longer, position_ids=positions(longer)).logits
    return difference(torch.stack(out.logits, 1), whole[:, -STEPS:])


CHECKS: dict[str, Callable[[Any, Tensor], float | None]] = {
    "prefill and steps": steps,
    "chunk size": chunks,
    "left padding": functools.partial(padding, left=True),
    "left padding without position_ids": left_padding_alone,
    "right padding": functools.partial(padding, left=False),
    "packed documents": packed,
    "beams": beams,
    "generate": greedy,
}


def constant_state(model: Any, ids: Tensor) -> str:
    """Why the decode state is not what the config promises, or nothing: one per linear layer, and it does not grow but
    by the keys and values of heads that keep softmax."""
    held: list[list[int]] = []
    heads = [len(layer["site"].get("softmax_groups", ())) for layer in model.config.linearize["layers"]]
    for length in (8, ids.shape[1]):
        cache = cache_of(call(model, ids[:, :length], use_cache=True))
        layers = [layer for layer in cache.layers if hasattr(layer, "state")]
        exact = [getattr(layer.state, "softmax", None) for layer in layers]
        held.append([held_bytes(vars(layer)) - held_bytes(its) for layer, its in zip(layers, exact, strict=True)])
        kept = [0 if its is None else its.keys.shape[2] for its in exact]
    if len(held[0]) != len(heads):
        return f"{len(held[0])} layers keep a state, the config has {len(heads)}"
    if sorted(kept) != sorted(heads):  # layers of a config may be in another order
        return f"{sum(kept)} KV heads keep keys and values, the config has {sum(heads)}"
    return "" if held[0] == held[1] else f"the state grows from {sum(held[0])} to {sum(held[1])} bytes"


def held_bytes(value: Any, item: int = 1) -> int:
    """Bytes of the tensors in a value, single numbers not counted. Floating numbers of fewer than `item` bytes count as
    if they had so many."""
    if isinstance(value, Tensor):
        each = max(value.element_size(), item if value.is_floating_point() else 1)
        return value.numel() * each if value.ndim else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return sum(held_bytes(part, item) for part in parts)


def loads_without_trust(folder: str) -> str:
    """Why a user who does not run the folder's code gets a model of softmax in silence, or nothing."""
    import transformers

    entries = json.loads((Path(folder) / "config.json").read_text("utf-8")).get("auto_map", {})
    autos = [getattr(transformers, name, None) for name in entries if name.startswith("AutoModel")]
    for auto in filter(None, autos):  # another transformers may not have one of them
        with contextlib.suppress(Exception):
            kind = type(auto.from_pretrained(folder, trust_remote_code=False)).__name__
            return f"without trust_remote_code it loads as {kind}, its mixers ignored"
    return ""


def one_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def result(work: Callable[[], str]) -> dict[str, Any]:
    """The row of a check that returns what is wrong, or nothing; an exception is wrong as well."""
    try:
        reason = work()
    except Exception as error:
        reason = f"the check raised {one_line(error)}"
    return {"status": "failed" if reason else "passed", "detail": reason}


def run(check: Callable[[Any, Any], float | None], model: Any, given: Any, limit: float) -> dict[str, Any]:
    """The row of one check, which is given token ids or inputs by name."""
    if isinstance(given, Tensor) and given.shape[1] < SHORTEST:
        return {"status": "skipped", "detail": f"the model takes too few positions: {given.shape[1] + STEPS}"}
    found = attempt(check, model, given)
    if found is None:
        return {"status": "skipped", "detail": "the model takes no position_ids"}
    numbers = {} if isinstance(found, Exception) else {"difference": found, "limit": limit}
    if not isinstance(found, Exception) and found <= limit:
        return {"status": "passed", "detail": "", **numbers}
    with model.teacher():
        source = attempt(check, model, given)
    if isinstance(found, Exception):
        same = type(found) is type(source)
        detail = f"raises {one_line(found)}" + ("; so does the model with softmax" if same else "")
        return {"status": "skipped" if same else "failed", "detail": detail}
    worse = math.isinf(found) and not (isinstance(source, float) and math.isinf(source))
    if isinstance(source, float) and source > limit and not worse:
        return {"status": "passed", "detail": f"differs, and so does the model with softmax ({source:.1e})", **numbers}
    detail = f"with softmax it raises {one_line(source)}" if isinstance(source, Exception) else ""
    return {"status": "failed", "detail": detail, **numbers}


def attempt(check: Callable[[Any, Any], float | None], model: Any, given: Any) -> float | Exception | None:
    """What a check returns or raises."""
    try:
        return check(model, given)
    except Exception as error:
        return error


def run_checks(model: Any, folder: str, length: int, limit: float) -> dict[str, dict[str, Any]]:
    """Every check of a loaded model by name, on rows of `length` tokens where it takes as many; of more beside a longer
    window."""
    checks = text_checks(model, length, limit) if writes_text(model) else encoder_checks(model, length, limit)
    checks["trust"] = result(lambda: loads_without_trust(folder))
    return checks


def rows(model: Any, B: int, length: int) -> Tensor:
    """Token ids [B,length], or fewer where the model takes no more positions; STEPS are left for generation."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length + STEPS
    return make_tokens(model, B, max(1, min(length, positions - STEPS)))


def report(share: float) -> None:
    """Tell the waiting process what share of the work was done since the last time; loading is as much as a check."""
    print(f"done {share}", flush=True)


def decoding(model: Any, limit: float) -> dict[str, Any] | None:
    """The row of `steps` on short rows, which go beyond windows where they can (`proof_length`), with the number of
    their `tokens` and the `window` that holds all of them (0: none does); None for a model that writes no text."""
    if not writes_text(model):
        return None
    ids, reach = rows(model, 2, proof_length(model.config, 24 - STEPS, STEPS) + STEPS), reach_of(model.config)
    T = ids.shape[1]
    return {**run(steps, model, ids, limit), "tokens": T, "window": reach if reach >= T else 0}


def text_checks(model: Any, length: int, limit: float) -> dict[str, dict[str, Any]]:
    """The checks of a model that writes text."""
    ids = rows(model, 3, max(length, proof_length(model.config, 1, STEPS) + STEPS))

    def finite() -> str:
        return "" if bool(call(model, ids).logits.isfinite().all()) else "logits that are not finite"

    checks = {"finite logits": result(finite)}
    for name, check in CHECKS.items():
        checks[name] = run(check, model, ids, limit)
        report(1 / (len(CHECKS) + 1))
    checks["constant state"] = result(lambda: constant_state(model, ids))
    return checks


def encoder_checks(model: Any, length: int, limit: float) -> dict[str, dict[str, Any]]:
    """The checks of any other model; what has no meaning for its inputs is left out."""
    inputs = make_inputs(model, 2, tokens_of(model, length))

    def finite() -> str:
        bad = [name for name, value in heads(model, inputs).items() if not bool(value.isfinite().all())]
        return f"not finite: {', '.join(bad)}" if bad else ""

    checks = {"finite outputs": result(finite)}
    for name, check in ENCODER_CHECKS.items():
        row = run(check, model, inputs, limit)
        if row["detail"] != "the model takes no position_ids":
            checks[name] = row
        report(1 / (len(ENCODER_CHECKS) + 1))
    return checks


def main() -> None:
    import transformers

    folder, dtype, length, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    loaded: Any = getattr(transformers, auto_class(config)).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, dtype=getattr(torch, dtype)
    )
    print("loaded", flush=True)  # what goes wrong from here on is no matter of loading
    model, loading = loaded[0].eval(), loaded[1]
    report(1 / ((len(CHECKS) if writes_text(model) else len(ENCODER_CHECKS)) + 1))
    checks = run_checks(model, folder, length, limit)
    keys = {kind: sorted(map(str, names)) for kind, names in loading.items() if names}
    print(json.dumps({"keys": keys, "checks": checks}))


# ---------------------------------------------------------------- encoders


def heads(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What one pass puts out, by name: tensors with a row for each of the inputs'."""
    B = len(next(iter(inputs.values())))
    with torch.no_grad():
        found = model(**inputs)
    values = {name: value for name, value in found.items() if isinstance(value, Tensor) and value.is_floating_point()}
    # Two towers are compared with each other, each row with all.
    return {n: value for n, value in values.items() if value.shape[:1] == (B,) and not n.startswith("logits_per_")}


def alone(model: Any, inputs: dict[str, Any]) -> float:
    """Rows of a batch are the rows alone."""
    whole, worst = heads(model, inputs), 0.0
    for row in range(len(next(iter(inputs.values())))):
        own = heads(model, {n: x[row : row + 1] if isinstance(x, Tensor) else x for n, x in inputs.items()})
        worst = max([worst, *(difference(own[name], whole[name][row : row + 1]) for name in own)])
    return worst


def padded_text(model: Any, inputs: dict[str, Any]) -> float | None:
    """Padding after a text changes nothing of it."""
    if [*inputs] != ["input_ids"]:
        return None
    ids = inputs["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, -ids.shape[1] // 3 :] = 0
    whole = heads(model, {"input_ids": ids, "attention_mask": mask})
    T = int(mask[0].sum())
    own = heads(model, {"input_ids": ids[:, :T]})
    return max(difference(value, whole[name][:, :T] if value.ndim == 3 else whole[name]) for name, value in own.items())


def other_size(model: Any, inputs: dict[str, Any]) -> float | None:
    """Images twice as high as those that the model was made for, where it takes them."""
    found = taller_images(model, inputs)
    return None if found is None else alone(model, found)


ENCODER_CHECKS: dict[str, Callable[[Any, Any], float | None]] = {
    "rows alone": alone,
    "padding": padded_text,
    "another size": other_size,
}
