"""Time and memory of converting large checkpoints: `python -m benchmarks.convert [SHAPE[-HOW] ...] [--json]`.

The sources are synthetic: real headers over files without content (sparse), so that 1.3 TB fit anywhere; reading
them costs what reading from memory costs. HOW is one of

    link     the output on the source's file system; the source is a plain folder, hashed while it is linked
    hub      the same, the source laid out as the cache of the Hub is, whose files are named by their hashes
    copy     the output on another file system (--other)
    cast     to float32, written anew
    pickle   pytorch_model.bin, written anew as safetensors; this source is not sparse

Each conversion runs in a process of its own. Peak memory is that of this process and of those that it starts, the
larger of the two, above what Python takes with torch and transformers imported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LLAMA = {"num_key_value_heads": 8, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("LlamaConfig", {**LLAMA, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2,
                             "num_attention_heads": 8, "vocab_size": 40000}),
    "1b": ("LlamaConfig", {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                           "num_attention_heads": 32, "vocab_size": 128256}),
    "7b": ("LlamaConfig", {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                           "num_attention_heads": 32, "vocab_size": 32000}),
    "70b": ("LlamaConfig", {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                            "num_attention_heads": 64, "vocab_size": 128256}),
    "671b": ("DeepseekV3Config", {"dtype": "bfloat16", "architectures": ["DeepseekV3ForCausalLM"]}),
}  # fmt: skip
HOWS = ("link", "hub", "copy", "cast", "pickle")
DEFAULT = ("7b-link", "7b-copy", "7b-cast", "1b-pickle", "70b-hub", "70b-link", "671b-hub")
SHARD = 5 * 10**9


# ---------------------------------------------------------------- synthetic sources


def tensors_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes as they are on the Hub: experts one by one, though transformers holds them as one tensor."""
    import torch
    import transformers

    model_class = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        state = model_class._from_config(config, dtype=torch.bfloat16).state_dict()
    found: dict[str, tuple[int, ...]] = {}
    for name, value in state.items():
        shape = tuple(value.shape)
        if name.endswith("experts.gate_up_proj"):
            for part in ("gate_proj", "up_proj"):
                stem = name.removesuffix("gate_up_proj")
                found |= {f"{stem}{e}.{part}.weight": (shape[1] // 2, shape[2]) for e in range(shape[0])}
        elif name.endswith("experts.down_proj"):
            found |= {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": shape[1:] for e in range(shape[0])}
        else:
            found[name] = shape
    return found


def in_shards(tensors: dict[str, tuple[int, ...]], limit: int) -> list[dict[str, tuple[int, ...]]]:
    """Tensors in the order of the model, at most `limit` bytes a shard in bfloat16."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        if held and held + size > limit:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += size
    return shards


def write_source(folder: Path, config: Any, how: str, limit: int = SHARD) -> None:
    """A checkpoint of `config` in bfloat16 whose numbers are all zero; sparse unless pickled."""
    blobs = folder.parent / "blobs"
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    shards, weight_map = in_shards(tensors_of(config), limit), {}
    stem, suffix = ("pytorch_model", ".bin") if how == "pickle" else ("model", ".safetensors")
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        weight_map |= dict.fromkeys(shard, name)
        if how == "pickle":
            write_pickle(folder / name, shard)
        elif how == "hub":
            blobs.mkdir(exist_ok=True)
            blob = blobs / hashlib.sha256(name.encode()).hexdigest()
            write_sparse(blob, shard)
            (folder / name).symlink_to(os.path.relpath(blob, folder))
        else:
            write_sparse(folder / name, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index), "utf-8")


def write_sparse(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file that is a header and a hole."""
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_pickle(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    import torch

    torch.save({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in tensors.items()}, path)


# ---------------------------------------------------------------- measuring


def measure(source: Path, output: Path, how: str) -> dict[str, Any]:
    """Convert in this process; seconds, bytes and peak memory."""
    import torch
    import transformers

    from linearize.convert import convert, plan_conversion
    from linearize.verify.reload import check_keys

    torch.set_num_threads(os.cpu_count() or 1)
    transformers.LlamaForCausalLM  # noqa: B018  lazily imported; every process that loads a model has such a class
    before, seconds, start = peak(), {}, time.perf_counter()
    planned = plan_conversion(str(source), "gsa", dtype="float32" if how == "cast" else "keep")
    seconds["plan"] = time.perf_counter() - start
    start = time.perf_counter()
    convert(*planned, output, level="none", say=lambda text: None)
    seconds["write"] = time.perf_counter() - start
    start = time.perf_counter()
    tensors = check_keys(output)
    seconds["verify"] = time.perf_counter() - start
    files = [path.stat() for path in output.glob("*.safetensors")]
    linked = sum(f.st_size for f in files if f.st_nlink > 1)
    return {
        "seconds": seconds,
        "tensors": tensors,
        "linked_bytes": linked,
        "written_bytes": sum(f.st_size for f in files) - linked,
        "peak_bytes": max(peak(), peak(resource.RUSAGE_CHILDREN)) - before,
        "interpreter_bytes": before,
    }


def peak(who: int = resource.RUSAGE_SELF) -> int:
    """The most memory that this process, or the largest of its children, has had; bytes."""
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(case: str, here: Path, other: Path) -> dict[str, Any]:
    """Lay a source out, convert it in a child, and clean up."""
    shape, how = case.split("-")
    with tempfile.TemporaryDirectory(dir=here) as a, tempfile.TemporaryDirectory(dir=other) as b:
        source = Path(a) / "source" / "model"
        arguments = [shape, how, str(source), str(Path(b if how == "copy" else a) / "output")]
        for step in ("lay", "measure"):
            command = [sys.executable, "-m", "benchmarks.convert", "--step", step, *arguments]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return {"case": case, **json.loads(done.stdout.splitlines()[-1])}


def step(name: str, shape: str, how: str, source: Path, output: Path) -> None:
    """One child's work."""
    if name == "lay":
        import transformers

        kind, values = SHAPES[shape]
        write_source(source, getattr(transformers, kind)(**values), how)
    else:
        print(json.dumps(measure(source, output, how)))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| case | tensors | plan s | write s | verify s | GB linked | GB written | GB/s | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        s, linked, written = row["seconds"], row["linked_bytes"] / 1e9, row["written_bytes"] / 1e9
        cells = [row["case"], f"{row['tensors']:,}", *(f"{s[name]:.1f}" for name in ("plan", "write", "verify"))]
        cells += [f"{linked:.1f}", f"{written:.1f}", f"{(linked + written) / s['write']:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {row['peak_bytes'] / 2**20:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=DEFAULT, help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--at", type=Path, default=Path(tempfile.gettempdir()), help="where sources are laid out")
    parser.add_argument("--other", type=Path, default=Path("/dev/shm"), help="another file system, for `copy`")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--step", choices=("lay", "measure"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        shape, how, source, output = given.cases
        return step(given.step, shape, how, Path(source), Path(output))
    for case in given.cases:
        if not re.fullmatch(f"({'|'.join(SHAPES)})-({'|'.join(HOWS)})", case):
            parser.error(f"{case}: expected SHAPE-HOW, shapes {', '.join(SHAPES)}, hows {', '.join(HOWS)}")
    rows = []
    for case in given.cases:
        rows.append(run(case, given.at, given.other))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(json.dumps(rows) if given.json else table(rows))
    return None


if __name__ == "__main__":
    main()
