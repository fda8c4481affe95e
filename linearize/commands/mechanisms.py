"""`linearize mechanisms`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..terminal.output import Json, print_json, size
from ..terminal.tables import results, table


def mechanisms(
    name: Annotated[str | None, typer.Argument(help="Show this mechanism with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the mechanisms that can replace softmax, or show one with its options."""
    from ..plan.mechanisms import describe, mechanism_names, summary

    whole = describe if as_json else summary
    found: Any = describe(name) if name is not None else [whole(known) for known in mechanism_names()]
    if as_json:
        print_json(found)
        return

    if name is None:
        mechanisms_table(found)
    else:
        mechanism_table(found)


def mechanisms_table(found: list[dict[str, Any]]) -> None:
    """One row a mechanism."""
    columns = {"name": "short", "what it is": "text", "paper": "short", "direction": "text", "backends": "text"}
    rows = [(one["name"], one["title"], one["paper"], direction(one), ", ".join(one["backends"])) for one in found]
    results().print(table(columns, rows))


def mechanism_table(one: dict[str, Any]) -> None:
    """Everything about one mechanism."""
    out, example = results(), one["example"]
    out.print(f"{one['name']}: {one['title']} ({one['paper']})")
    out.print(f"{direction(one)}; backends: {', '.join(one['backends'])}\n\n{one['about']}\n")
    out.print(f"State, bytes per layer and sequence: {one['state_formula']}")
    if any(option["name"] == "window" for option in one["options"]) and one["name"] != "window":
        out.print("A window adds (window + sink) Hkv (D + Dv) numbers in the model's dtype; states are float32.")
    out.print(
        f"In {example['site']}, in 16 bits: {example['new_parameters']:,} new parameters and a state of "
        f"{size(example['state_bytes'])}. A KV cache of {example['tokens']:,} tokens takes "
        f"{size(example['cache_bytes'])}.\n"
    )
    columns = {"option": "short", "default": "short", "published": "short", "what it sets": "text"}
    rows = []
    for option in one["options"]:
        published = str(option["published"]) if option["published"] != option["default"] else ""
        meaning = f"{option['about']}: {values(option)}"
        rows.append((option["name"], str(option["default"]), published, meaning))
    out.print(table(columns, rows))
    if any(option["published"] != option["default"] for option in one["options"]):
        out.print("\n`--set faithful=true` starts from what is published.")


def direction(one: dict[str, Any]) -> str:
    """Which models a mechanism is for."""
    return ", ".join(word for word in ("causal", "bidirectional") if one[word])


def values(option: dict[str, Any]) -> str:
    """What an option may be."""
    if option["type"] == "choice":
        return " | ".join(option["choices"])
    return f"{option['type']} {option['low']:g} to {option['high']:g}" if "low" in option else option["type"]
