"""What a rehearsal compiles, beside what batches of requests need: found without a GPU, in a process of its own.

`PYTHONPATH=tests:tests/kernels python tests/serve/rehearsed.py` prints what was not rehearsed, by mechanism.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable
from typing import Any

import launches
import torch
from sizes import GPUS, Heads, site_and_options
from torch._subclasses.fake_tensor import FakeTensorMode

from linearize_kernels.gpu import launch
from linearize_kernels.gpu.operators import HOSTS

TOTAL = 8192
HEADS = Heads(32, 8, 64)
NEAR = {"window": 64, "sink": 1}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gsa", {"slots": 128, "state_heads": "query", **NEAR}),
    ("gsa", NEAR),
    ("gdn", NEAR),
    ("gdn", {"taps": 4}),
    ("gla", NEAR),
    ("retnet", {}),
    ("la", NEAR),
    ("sla", {"base": "gdn"}),
    ("window", {"window": 64}),
)


def main() -> int:
    launches.replace_entries()
    launches.GPU[0] = GPUS["H200"]
    import linearize_kernels.window.window  # noqa: F401  (mixers with a window look it up)
    from linearize.serve.batch import Batch, Pool, prompts_of, rehearse, run
    from linearize.serve.states import StateLayout, example_state
    from linearize_kernels.layout import TokenLayout

    late = 0
    for name, options in CASES:
        kind, site, chosen = site_and_options(name, options, HEADS)
        chance, heads = random.Random(0), (HEADS.H, HEADS.Hkv, HEADS.Hkv)
        with torch.device("meta"), torch.no_grad():
            mixer = kind(site, **chosen).to(torch.bfloat16)
            layout = StateLayout(example_state(mixer, torch.bfloat16))
            q, k, v = (torch.empty(1, TOTAL, H, HEADS.D, dtype=torch.bfloat16) for H in heads)
            x = torch.empty(1, TOTAL, site.hidden, dtype=torch.bfloat16)
            inputs, _ = mixer.prepare(q, k, v, x, TokenLayout(plain=True))
            outputs = mixer.empty_outputs(inputs, v)
            with launches.Recorded() as known:
                rehearse(mixer, TokenLayout, layout, inputs, outputs)
            pool = Pool.of(layout, torch.empty(99, layout.bytes, dtype=torch.uint8))
            with launches.Recorded() as wanted:
                for _ in range(40):
                    n, lengths = chance.choice((0, 1, 5)), [chance.randint(2, chance.choice((40, 300, 4000)))]
                    while chance.random() < 0.8 and sum(lengths) < chance.choice((3000, 7000)):
                        lengths.append(chance.randint(2, 900))
                    if n + sum(lengths) <= TOTAL:
                        seen = [chance.choice((0, 7)) for _ in lengths]
                        starts, rows = torch.tensor([0, *lengths]).cumsum(0), torch.zeros(99, dtype=torch.int32)
                        given = prompts_of(lengths, seen, n, starts, torch.tensor(seen), rows[: len(lengths)])
                        run(mixer, TokenLayout, pool, Batch(rows[:n], torch.zeros(n, 1).long(), given), inputs, outputs)
        missing = compiled(wanted.calls) - compiled(known.calls)
        late += len(missing)
        for one in sorted(missing):
            print("late", name, options, *one, flush=True)
    return late


def compiled(made: list[tuple[str, tuple[Any, ...]]]) -> set[tuple[str, str]]:
    """What triton compiles for calls of operators: kernels, and what it compiles them for."""
    found: dict[Hashable, Any] = {}
    token = launch._collected.set(found)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), launches.Indexed():
            for name, args in made:
                HOSTS[name](*(launches._on_gpu(x) for x in args))
    finally:
        launch._collected.reset(token)
    return {(one.args[0].fn.__name__, repr(key[1:])) for key, one in found.items()}  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main() > 0)
