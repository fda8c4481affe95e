"""What kernels need of shared memory, at sizes of attention modules in use, found without a GPU (launches.py).

Each case is a clean process running this file.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parent.parent
# Of each GPU the launches that need most, by kernel: mechanism, options, heads and Way, as launches.py printed them.
LARGEST = Path(__file__).parent / "largest.json"
CASES = [("llama", "five heads", "every size", "every launch", "hedgehog"), ("H200", "A100", "4090")]


@pytest.mark.slow
@pytest.mark.parametrize("cases", CASES, ids="-".join)
def test_launches_fit(cases: tuple[str, ...], tmp_path: Path) -> None:
    paths = [os.environ.get("PYTHONPATH", ""), *map(str, (TESTS.parent, TESTS, TESTS / "kernels"))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, __file__, *cases], env=env, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def rtx_4090(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of a GPU with little shared memory, of which nothing was warned yet."""
    from linearize_kernels.gpu import launch

    class Properties:
        major, minor, multi_processor_count, shared_memory_per_block_optin = 8, 9, 128, 101376

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(launch, "_warned", set())
    return torch.device("cuda", 7)  # configurations are remembered by device


@pytest.mark.parametrize(
    ("module", "inputs", "reason"),
    [
        ("gsa.config", (torch.bfloat16, 128, 256, 256), "128 slots with head dim 256"),
        ("saga.launch", (torch.float32, 128, 128, "elu"), "head dim 128"),
    ],
)
def test_what_does_not_fit_is_left_to_pytorch_and_said_once(
    rtx_4090: torch.device, module: str, inputs: tuple[Any, ...], reason: str
) -> None:
    obstacle = importlib.import_module(f"linearize_kernels.{module}").obstacle
    with pytest.warns(UserWarning, match=rf"{reason}.*memory.*PyTorch") as warned:
        assert reason in obstacle(rtx_4090, *inputs)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reason in obstacle(rtx_4090, *inputs)


def test_learned_maps_leave_what_does_not_fit_to_pytorch_and_say_so_once(rtx_4090: torch.device) -> None:
    from linearize_kernels.layers import learned_maps

    device, half, single = rtx_4090, torch.bfloat16, torch.float32
    with pytest.warns(UserWarning, match=r"128.*163840.*101376.*memory.*PyTorch"):
        assert learned_maps._obstacle(device, half, single, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert learned_maps._obstacle(device, half, single, 128)
        assert not learned_maps._obstacle(device, half, half, 128)
        assert not learned_maps._obstacle(device, single, single, 64)


def main(case: str) -> None:
    import launches
    from launches import Way, calls
    from sizes import GPUS, HEADS, OPTIONS, Gpu, Heads

    launches.replace_entries()
    h200 = GPUS["H200"]

    def backward_scans(heads: Heads) -> list[int]:
        """What the kernels that walk backwards over all query heads of a memory need, at B4 T2048."""
        made = calls("gla", OPTIONS["gla"][0], heads, (Way(4, 2048),), h200)
        found = [one for one in launches.launches(made).values() if one.name.endswith("gla_scan_kernel")]
        return [launches.need(one) for one in found if one.keywords["REVERSE"]]

    launches.set_driver(h200.capability)
    if case in ("llama", "five heads"):  # 311,296 bytes and more, as long as stages were those of one query head
        needs = backward_scans(HEADS[1] if case == "llama" else Heads(10, 2, 128))
        assert len(needs) == 2, needs
        assert max(needs) <= h200.shared, needs
    elif case == "every size":  # kernels, or a reason why not
        for name in OPTIONS:
            for gpu in GPUS.values():
                launches.REFUSED.clear()
                for heads in HEADS:
                    made = calls(name, OPTIONS[name][0], heads, (Way(4, 2048),), gpu)
                    assert launches.launches(made) or not made
                assert all("bytes of shared memory" in reason for reason in launches.REFUSED)
                assert not launches.REFUSED or gpu.shared < h200.shared
    elif case == "every launch":  # what it needs was computed, of the code that there is now
        table = json.loads(launches.NEEDS.read_text())
        changed = launches.stale(table)
        assert not changed, f"PYTHONPATH=tests python tests/kernels/launches.py write GPU, for each of {changed}"
        for name, kernels in table.items():
            too_much = [
                kernel for rows in kernels.values() for kernel, row in rows.items() if row[1] > GPUS[name].shared
            ]
            assert not too_much, (name, too_much)
    elif case in GPUS:  # the launches that need most of this GPU
        launches.set_driver(GPUS[case].capability)
        for kernel, name, options, heads, *way in json.loads(LARGEST.read_text())[case]:
            size = Heads(*map(int, re.findall(r"\d+", heads)))
            made = launches.launches(calls(name, options, size, (Way(*way),), GPUS[case]))
            needs = [launches.need(one) for one in made.values() if one.name == kernel]
            assert needs, f"{name} {options} {heads} {way} no longer launches {kernel}"
            assert max(needs) <= GPUS[case].shared, (kernel, name, options, heads, way, needs)
    else:
        from linearize_kernels.layers.learned_maps import shared_bytes

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        half, single = torch.bfloat16, torch.float32
        host = next(name for name in launches.HOSTS if name.endswith("learned_map_backward"))
        for capability, y, weights in ((80, half, single), (90, single, single)):
            launches.set_driver(capability)
            launches.GPU[0] = Gpu(capability, 1 << 20, 108)
            for size, bias in ((256, None), (128, empty(2, 128, dtype=weights))):
                rows = (empty(1, 256, 2, D, dtype=y) for D in (size, 128))
                call = host, (*rows, empty(2, 128, 128, dtype=weights), bias, 0.3)
                (one,) = launches.launches([call]).values()
                assert launches.need(one) <= shared_bytes(capability // 10, y, weights, 128), (capability, y, size)


if __name__ == "__main__":
    import launches  # noqa: F401
    from triton_tools import in_forks

    in_forks(main, sys.argv[1:])
