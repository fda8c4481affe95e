"""`linearize estimate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..terminal.arguments import Overrides, check_base
from ..terminal.output import Json, duration, print_json, say, size
from ..terminal.progress import starting, uncollected
from ..terminal.tables import asked_for, console, table, unit_of_stages


def estimate(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a preset (list: linearize recipes ls).")],
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="Card to estimate for: a100-80g, h100, h200, 4090, .. Default: this machine's.")
    ] = None,
    price: Annotated[str | None, typer.Option(help="Price of one device for an hour: 2.5/h, or 2.5.")] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Run two steps of each stage, on random weights, and compute the time from them."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Estimate what a recipe costs: peak memory by its parts, tokens a second, hours, energy, price, disk.

    It reads configs alone, no weights and no data. With --measure it also runs steps.
    """
    check_base(overrides or [])
    from ..estimate.cards import figures, per_hour

    hourly = per_hour(price)
    if gpu is not None:
        figures(gpu)
    from ..recipe.recipe import load_recipe

    with uncollected():  # a mechanism's options are checked by its code, which imports torch
        loaded = load_recipe(recipe, overrides or [])
    with starting():
        from ..job.dry_run import dry_run

    found = dry_run(loaded, say, gpu=gpu, price=hourly, measure=measure)
    data_lines(found["stages"])
    estimate_table(found)
    if as_json:
        print_json(found)


def data_lines(plans: list[dict[str, Any]]) -> None:
    """What the stages read and how much they ask for, then on what they are evaluated: once where it is the same."""
    trained: dict[str, dict[str, list[str]]] = {}
    evaluated: dict[str, list[str]] = {}
    for plan in plans:
        data = plan["data"]
        images = data["seq_len"] == 1
        train = data["train"] + ("" if images else f" in blocks of {data['seq_len']:,}")
        if not images and plan["tokens"] and (plan["steps"] or 0) > 1:
            train += f", {plan['tokens'] // plan['steps']:,} tokens a step"
        asked = f"{plan['epochs']:g} epochs" if data["tokens"] is None else asked_for(data["tokens"], images)
        asked += "" if data["tokens"] is None or images else " in whole steps"
        if "passes" in data:
            asked += f", {data['passes']} passes or more"
        held = (
            "nothing" if data["eval"] is None else f"{data['eval']}, at most {asked_for(data['eval_tokens'], images)}"
        )
        trained.setdefault(train, {}).setdefault(asked, []).append(plan["name"])
        evaluated.setdefault(held, []).append(plan["name"])

    def named(names: list[str], words: str) -> str:
        return words if len(names) == len(plans) else f"{', '.join(names)} {words}"

    out = console()
    for train, amounts in trained.items():
        out.print(f"trains on {train}: {'; '.join(named(names, asked) for asked, names in amounts.items())}")
    for held, names in evaluated.items():
        out.print(named(names, f"evaluated on {held}"))
    if any(plan["data"].get("foreign_eval") for plan in plans):
        out.print("note: data.eval is a dataset still. For text of yours add 'data.eval={files: [held-out.txt]}'")


# Shares of a measured step, which a GPU has.
SHARES = {"products": "of peak FLOP/s", "device_waits": "waiting"}
# What the parts of an estimate's memory are called where that is not their key.
PART_NAMES = {"masters": "float32 weights", "total": "sum"}


def estimate_table(found: dict[str, Any]) -> None:
    """What a run costs: memory of each stage by its parts, then time, and what holds for all."""
    out, device = console(), found["device"]
    parts = [part for part in found["stages"][0]["memory"] if part not in ("total", "device")]
    columns = {"part": "short"} | dict.fromkeys((row["name"] for row in found["stages"]), "number")
    rows = []
    for part in (*parts, "total"):
        held = [row["memory"][part] for row in found["stages"]]
        if part == "weights":  # where every weight trains in float32, what is left are buffers
            masters = [row["memory"]["masters"] for row in found["stages"]]
            held = [count * (1000 * count > master) for count, master in zip(held, masters, strict=True)]
        rows.append((PART_NAMES.get(part, part), *(size(count) if count else "0" for count in held)))
    count = f"each of {device['count']} x " if device["count"] > 1 else ""
    out.print(table(columns, rows, f"peak memory of {count}{device['name']} ({size(device['memory'])})"))
    unit = unit_of_stages(found["stages"])
    beside = "needs: the sum above, and what CUDA and its allocator take besides"
    columns = {"stage": "short", "needs": "number", "fits": "short", f"{unit}/s": "number", "time": "number"}
    measured = any(row.get("measured") for row in found["stages"])
    columns |= {"measured": "text"} if measured else {}
    rows = []
    for row in found["stages"]:
        rate, hours = row["tokens_per_s"], row["hours"]
        cells: tuple[str, ...] = (row["name"], size(row["memory"]["device"]), "yes" if row["fits"] else "NO")
        cells += ("" if rate is None else f"{rate:,.0f}", "" if hours is None else duration(3600 * hours))
        if measured:
            one = row["measured"]
            told = [f"{one['tokens_per_s']:,.0f} {unit}/s"]
            told += [f"{one[key]:.0%} {what}" for key, what in SHARES.items() if one.get(key) is not None]
            told += ["CUDA graphs"] if one.get("graphs") else []
            cells += (", ".join([*told, size(one["peak"])]),)
        rows.append(cells)
    out.print(table(columns, rows, beside if device["name"] != "cpu" else None))
    if device["name"] == "cpu":
        out.print(
            "These are tensors. On a CPU a run shows the peak of its whole process, with Python, its packages and "
            "memory that was freed and is kept. The cores' speed was measured just now, next to all else that runs"
        )
    for row in found["stages"]:
        if row["uncounted"]:
            out.print(f"activations of {row['name']} are not counted: {row['uncounted']}")
        if row["host_bytes"]:
            out.print(f"{row['name']} keeps {size(row['host_bytes'])} of activations in the host's memory")
    disk = found["disk"]
    told = [
        f"disk {size(disk['total'])} when it is fullest ("
        + ", ".join(f"{k} {size(v)}" for k, v in disk.items() if v and k != "total")
        + ")"
    ]
    told += [] if found["hours"] is None else [spent(found)]
    told += [] if found["kwh"] is None else [f"{found['kwh']:.2g} kWh at full power"]
    if found["price"] is not None:
        hourly = f" at {found['price'] / (found['hours'] * device['count']):.4g} an hour" if found["hours"] else ""
        told.append(f"price {found['price']:.2f}{hourly}{' and device' * (device['count'] > 1)}")
    out.print("; ".join(told))


def spent(found: dict[str, Any]) -> str:
    """The time of a whole run by what takes it."""
    parts = [f"{name} {duration(3600 * hours)}" for name, hours in found["hours_of"].items() if hours]
    return f"{duration(3600 * found['hours'])} in all ({', '.join(parts)})"
