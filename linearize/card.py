"""The model card: what this checkpoint is, where it comes from, how to load it. Only facts that are known."""

from __future__ import annotations

from . import __version__
from .drops import ranges
from .plan import Plan
from .source import Source

CARD = """---
library_name: transformers
pipeline_tag: text-generation
base_model: {base}
tags:
- linear-attention
{tags}---

# {name} with {mechanisms} attention

[`{base}`]({base}) with its softmax attention replaced by {mechanisms} in layers {layers}{kept}.
Written by linearize {version}. {training}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
```

`trust_remote_code=True` loads the Python files of this folder: they hold the mechanism. Only torch and
transformers >= 5.17 are needed.

| | |
|---|---|
| source | `{base}`{revision} |
| architecture | {architecture} |
| new parameters | {new_parameters:,} |
| decode state per sequence | {state:,} bytes, whatever the length{kv} |
| options | `{options}` |
{notes}"""


UNTRAINED = "The new parameters are untrained: distil before use."


def model_card(plan: Plan, source: Source, training: str = UNTRAINED) -> str:
    """README.md of a converted checkpoint."""
    mechanisms = sorted({step.mechanism for step in plan.steps})
    kept = [site.layer for site in plan.kept]
    notes = "".join(f"\n- dropped: {note}" for note in plan.notes)
    return CARD.format(
        base=source.name,
        name=source.name.rpartition("/")[2],
        tags="".join(f"- {m}\n" for m in mechanisms),
        mechanisms=", ".join(m.upper() for m in mechanisms),
        layers=ranges([step.site.layer for step in plan.steps]),
        kept=f"; layers {ranges(kept)} keep softmax" if kept else "",
        version=__version__,
        training=training,
        revision=f" at `{plan.revision}`" if plan.revision else "",
        architecture=plan.architecture,
        new_parameters=plan.new_parameters,
        state=sum(step.state_bytes for step in plan.steps),
        kv=" (plus the KV cache of the softmax layers)" if kept else "",
        options=plan.steps[0].options,
        notes=notes + "\n" if notes else "",
    )
