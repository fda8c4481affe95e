"""Every causal mechanism on every architecture of engines.py in vLLM, all layers linear or two kept; run by hand.

    .venv-vllm/bin/python tests/serve/vllm_matrix.py [ARCHITECTURE ...]

prints a line for each engine, and ends with 1 if one wrote something else than generate(). An engine takes about half a
minute on two cores.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from engines import (
    ARCHITECTURES,
    Case,
    alike,
    converted,
    differences,
    engine,
    expected,
    fill_with_nan,
    load,
    prompts_of,
)
from engines import write as write_tokens

from linearize.plan.mechanisms import load_mechanism, mechanism_names

LENGTHS = (1, 130, 7, 64, 33, 90)
NEW = 8


def outcome(case: Case, folder: Path) -> str:
    """`equal`, or what went wrong."""
    try:
        linear = converted(folder, case)
        prompts = prompts_of(LENGTHS)
        references = expected(load(linear), prompts, NEW)
        with engine(linear, max_num_batched_tokens=64) as llm:
            fill_with_nan(llm)
            return "; ".join(differences(write_tokens(llm, prompts, NEW), references)) or "equal"
    except Exception as error:  # of vLLM, which raises as it likes; the line says it
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main(architectures: list[str]) -> int:
    failed = 0
    for architecture in architectures:
        for mechanism in mechanism_names():
            # vLLM knows those without a rotary embedding by itself (docs/native.md).
            if not load_mechanism(mechanism).causal or load_mechanism(mechanism).unrotated:
                continue
            for keep in ((), (1, 2)):
                with tempfile.TemporaryDirectory() as place:
                    message = outcome(alike(architecture, mechanism, keep), Path(place))
                failed += message != "equal"
                print(f"{architecture:10} {mechanism:7} {'hybrid' if keep else 'all':7} {message}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*ARCHITECTURES]))
