"""Keys of recipes that had another name once: files, overrides and records that have it are read as today's. Of keys
that are gone, what takes their place."""

from __future__ import annotations

from typing import Any

from ..plan.mechanisms import present_option

# (Key of the mapping around it, old name) -> present name.
RENAMED = {
    ("batch", "accumulate"): "gradient_accumulation_steps",
    ("checkpoint", "keep"): "save_total_limit",
    ("lora", "target"): "target_modules",
    ("loss", "tokens_at_once"): "chunk_size",
    ("optimizer", "clip"): "max_grad_norm",
}
# What recipes no longer have: (key of the mapping around it, key) or (key, value) -> what to do in its place.
GONE: dict[tuple[Any, ...], str] = {
    ("kind", "on_policy_kl"): "on_policy_kl is gone: logit_kl learns as much. Set kind: logit_kl, leave loss out",
    ("teacher", "logits"): "predictions on disk are no longer read. Leave it out, and name the model: teacher.model",
}


def present_key(around: Any, key: str) -> str:
    """The present name of a key in the mapping that is the value of `around`."""
    if around == "options":  # of a mechanism
        return present_option(key)
    return RENAMED.get((around, key), key)


def present_keys(recipe: Any, around: Any = None) -> Any:
    """A recipe, or a part of one, with the present names of its keys, and without keys that are gone and said nothing.
    One that has both names of a key is left so."""
    if isinstance(recipe, list):
        return [present_keys(item, around) for item in recipe]
    if not isinstance(recipe, dict):
        return recipe
    kept = {key: value for key, value in recipe.items() if value is not None or (around, key) not in GONE}
    names = {key: present_key(around, key) for key in kept}
    return {key if names[key] in kept else names[key]: present_keys(value, key) for key, value in kept.items()}
