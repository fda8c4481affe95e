"""The JSON schema of recipes, for editors: of text and images, and of latents."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from ..diffusion.recipe import DiffusionRecipe
from .models import Recipe

# Names the schema whatever folder or address it is read from; 1 is the recipes' `version`.
SCHEMA_ID = "urn:linearize:recipe:1"

# What tells the two kinds apart, as `holds_latents` does.
OF_LATENTS = {
    "required": ["data"],
    "properties": {
        "data": {
            "type": "object",
            "required": ["train"],
            "properties": {"train": {"type": "object", "required": ["latents"]}},
        }
    },
}


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes: in `$defs` a description of each key, with its unit. A recipe whose `data.train` has
    `latents` is a DiffusionRecipe, any other one a Recipe."""
    _, found = models_json_schema([(Recipe, "validation"), (DiffusionRecipe, "validation")])
    kinds = {kind.__name__: found["$defs"].pop(kind.__name__) for kind in (Recipe, DiffusionRecipe)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "Recipe",
        "if": OF_LATENTS,
        "then": {"$ref": "#/$defs/DiffusionRecipe"},
        "else": {"$ref": "#/$defs/Recipe"},
        "$defs": {**kinds, **found["$defs"]},
    }
