"""One engine of `linearize bench serve`: python -m linearize.bench.serve_engine '{"model": .., "loads": ..}'."""

import copy
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from ..errors import Exit, did_you_mean
from .serve import REFUSED

# Loads of fewer tokens are measured three times, and the middle figure counts.
SHORT = 100_000


def fitting(worker: Any, tokens: int) -> float:
    """How many sequences of so many tokens the memory of a worker holds."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    config = copy.copy(worker.vllm_config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = tokens
    return float(get_max_concurrency_for_kv_cache_config(config, worker.model_runner.kv_cache_config))


def measure(llm: Any, requests: int, tokens: int, steps: int, seed: int) -> dict[str, float]:
    """Seconds to read all prompts, and of `steps` steps after the last of them was read."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    chance = torch.Generator().manual_seed(seed)
    # The first request goes on writing while the last is read.
    room = engine.model_config.max_model_len - tokens
    sampling = SamplingParams(
        max_tokens=room, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    vocabulary = engine.model_config.get_vocab_size()
    names = [f"{seed}-{i}" for i in range(requests)]
    prompts = torch.randint(10, vocabulary - 10, (requests, tokens), generator=chance).tolist()
    start, written = time.perf_counter(), dict.fromkeys(names, 0)
    first: dict[str, float] = {}
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    begin: float = 0.0
    base: dict[str, int] = {}
    while True:
        for output in engine.step():
            written[output.request_id] += len(output.outputs[0].token_ids)
            first.setdefault(output.request_id, time.perf_counter())
        if begin and min(written[name] - base[name] for name in names) >= steps:
            break
        if not begin and len(first) == requests:
            begin, base = time.perf_counter(), dict(written)
    end = time.perf_counter()
    total = sum(written[name] - base[name] for name in names)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    read = max(first.values()) - start
    return {
        "read_tokens_s": requests * tokens / read,
        "first_token_s": min(first.values()) - start,
        "written_tokens_s": total / (end - begin),
        "step_ms": (end - begin) / (total / requests) * 1e3,
    }


def refuse(reason: str, code: Exit) -> NoReturn:
    print(REFUSED + reason, flush=True)
    sys.exit(code)


def main() -> None:
    asked = json.loads(sys.argv[1])
    import torch
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    start, loads = time.perf_counter(), asked["loads"]
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := next((name for name in asked["options"] if name not in known), None):
        refuse(f"--engine {unknown}: vLLM has no such option.{did_you_mean(unknown, known)}", Exit.USAGE)
    longest = max(tokens for _, tokens in loads) + 2 * asked["steps"] + 64
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True, "max_model_len": longest,
        "enable_prefix_caching": False, "disable_log_stats": True, **asked["options"],
    }  # fmt: skip
    try:
        llm = vllm.LLM(asked["model"], **settings)
    except ValueError as error:  # such as more tokens than the model takes
        refuse(f"vLLM refuses it: {error}", Exit.INCOMPATIBLE)
    result: dict[str, Any] = {"start_s": round(time.perf_counter() - start, 1), "loads": {}}
    # What the first requests of a server pay beside the tenth.
    times = [measure(llm, 1, 64, 4, 1000 + i)["first_token_s"] for i in range(10)]
    result["first_request_s"], result["tenth_request_s"] = round(times[0], 4), round(times[-1], 4)
    for number, (requests, tokens) in enumerate(loads):
        # Shapes that were not seen yet; four long prompts have them all.
        measure(llm, min(requests, 4) if tokens > 8192 else requests, tokens, 8, 100 + number)
        # Short loads wait for Python, whose times vary.
        times_measured = 3 if requests * tokens < SHORT else 1
        runs = [measure(llm, requests, tokens, asked["steps"], number + 50 * i) for i in range(times_measured)]
        figures = {name: sorted(run[name] for run in runs)[len(runs) // 2] for name in runs[0]}
        result["loads"][f"{requests} x {tokens}"] = {name: round(value, 4) for name, value in figures.items()}
    result["fits"] = {str(asked["held"]): round(llm.collective_rpc(fitting, args=(asked["held"],))[0], 2)}
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result["machine"] = {"device": name, "vllm": vllm.__version__, "torch": torch.__version__}
    Path(asked["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
