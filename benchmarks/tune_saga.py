"""Measure tiles of SAGA's kernels on this GPU, for the table SHIPPED in kernels/saga/launch.py.

    python -m benchmarks.tune_saga                              # PVT-T's first stage at 1280 pixels, hedgehog
    python -m benchmarks.tune_saga --shape 32 4096 6 64 --plain   # B T H D, q and k are features

Device time of each kernel in a forward and backward, in us, by chunk, warps and buffers, and by programs for each
multiprocessor. Nothing is written.
"""

from __future__ import annotations

import argparse

import torch

from linearize.bench.case import Shape
from linearize_kernels.gpu import launch
from linearize_kernels.saga import launch as saga_launch
from linearize_kernels.saga.launch import Config, Tiles

from .tune_gsa import kernel_times

CANDIDATES = [Tiles(*sizes) for sizes in ((64, 4, 2), (32, 4, 2), (32, 4, 3), (64, 4, 1), (128, 8, 2), (128, 8, 1))]
PROGRAMS = (4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=(16, 102400, 1, 64), metavar=("B", "T", "H", "D"))
    parser.add_argument("--plain", action="store_true", help="without hedgehog's features")
    args = parser.parse_args()
    B, T, H, D = args.shape
    shape = Shape(B, T, H, H, D, causal=False, base="" if args.plain else "hedgehog")
    chosen = saga_launch.configure
    for tiles in CANDIDATES:
        launch._calls.clear()  # or the kernels would compile one after another
        launch._kinds.clear()
        for programs in PROGRAMS:

            def configure(device: torch.device, *others: object) -> Config:
                config = chosen(device, *others)  # type: ignore[arg-type]
                each = config.programs // 4
                return Config(tiles, tiles, tiles, tiles, programs * each, config.precision)  # noqa: B023

            saga_launch.configure = configure  # type: ignore[assignment]
            try:
                times = kernel_times("saga", shape)
                shown = ", ".join(f"{name} {us:.0f}" for name, us in times.items())
            except Exception as error:  # a candidate may need more shared memory than there is
                shown = f"{type(error).__name__}: {str(error)[:80]}"
            print(f"{shape}, {tuple(tiles)}, programs {programs}: {shown}", flush=True)


if __name__ == "__main__":
    main()
