"""`linearize inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..terminal.arguments import Model, Revision, Trust
from ..terminal.output import Json, layers_named, print_json, ranges
from ..terminal.progress import starting
from ..terminal.tables import alike, any_layer, attention, chosen_options, console, table

if TYPE_CHECKING:
    from ..probe.inspection import Converted, Inspection


def inspect(model: Model, trust_remote_code: Trust = False, revision: Revision = None, as_json: Json = False) -> None:
    """Show a model's attention modules and the mechanisms that fit, or what a converted model has in their place."""
    with starting():
        from ..probe.inspection import Converted, inspect_model

    inspection = inspect_model(model, revision=revision, trust_remote_code=trust_remote_code)
    if isinstance(inspection, Converted):
        converted_table(inspection)
    else:
        inspection_tables(inspection)
    if as_json:
        print_json(inspection.to_json())


def inspection_tables(inspection: Inspection) -> None:
    """Attention modules with their shapes, and which mechanisms fit."""
    from ..plan.plan import grouped

    out, found = console(), inspection.found
    title = f"{inspection.source} ({inspection.architecture}, {inspection.model_type})"
    columns = {"layers": "short", "module": "text", "class": "text"}
    columns |= dict.fromkeys(("H", "Hkv", "D", "Dv", "scale"), "number")
    rows: list[tuple[int, tuple[str, ...]]] = []
    for site in found.sites:
        heads = (site.heads, site.kv_heads, site.key_dim, site.value_dim)
        rows.append((site.layer, (site.path, site.kind, *map(str, heads), f"{site.scale:.4g}")))
    out.print(table(columns, alike(rows), title))
    out.print("H: query heads, Hkv: KV heads, D and Dv: width of a key and of a value; scale multiplies q.k")
    for extra in sorted({extra for site in found.sites for extra in site.extras}):
        layers = layers_named(site.layer for site in found.sites if extra in site.extras)
        out.print(f"also passed to softmax in {layers}: {extra}")
    for other in grouped(found.others):
        out.print(f"stays as it is: {other}")
    fits = []
    for fit in inspection.fits:
        reasons = dict.fromkeys(any_layer(reason) for _, reason in fit.obstacles)
        fits.append((fit.mechanism, fit.title, ranges(list(fit.layers)) or "none", "\n".join(reasons)))
    columns = {"mechanism": "short", "what it is": "text", "fits layers": "text", "why not the others": "text"}
    out.print(table(columns, fits))


def converted_table(inspection: Converted) -> None:
    """The layers of a converted model, and the options in which they differ from the mechanism's defaults."""
    out, plan = console(), inspection.plan
    rows: list[tuple[int, tuple[str, ...]]] = []
    for step in plan.steps:
        rows.append((step.site.layer, (step.site.path, attention(plan, step), chosen_options(step))))
    rows += [(site.layer, (site.path, "softmax", "")) for site in plan.kept]
    columns = {"layers": "short", "module": "text", "attention": "short", "options": "text"}
    out.print(table(columns, alike(rows), f"{inspection.source} (converted {plan.architecture})"))
