"""Claims of "SAGA: Selective Adaptive Gating for Efficient and Expressive Linear Attention" (arXiv 2509.12817).

Throughput of inference beside the softmax of transformers, 256 images of 224 pixels or 16 of 1,280, on a 4090. Shares
are compared, for the device is another one.
"""

from __future__ import annotations

from benchmarks.measured import Images
from benchmarks.paper import Claim


def beside(shape: str, pixels: int = 224, batch: int = 256, sdpa: bool = False) -> tuple[Images, Images]:
    ours = Images(shape, pixels, batch, "saga", "faithful=true")
    return ours, ours._replace(beside="softmax, SDPA" if sdpa else "softmax")


def share(shape: str, saga: int, softmax: int, pixels: int = 224, batch: int = 256) -> Claim:
    about = f"{shape}, {pixels} px, images/s over softmax"
    name = shape if pixels == 224 else f"{shape}-{pixels}"
    return Claim(name, "table 1", about, "rate", *beside(shape, pixels, batch), published=saga / softmax)


CLAIMS = (
    Claim("pvt-t-1280", "figure 4a", "pvt-t, 1,280 px, images/s over softmax", "rate", *beside("pvt-t", 1280, 16),
          published=1.76),
    Claim("pvt-t-1280-memory", "figure 4b", "pvt-t, 1,280 px, peak of memory, softmax / SAGA", "memory",
          *beside("pvt-t", 1280, 16), published=2.69),
    Claim("pvt-t-1280-sdpa", "figure 4a", "the same images/s over softmax by SDPA", "rate",
          *beside("pvt-t", 1280, 16, True), published=1.76),
    share("pvt-t", 2205, 2995),
    share("deit-t", 4990, 5761),
    share("swin-t", 1367, 1511),
    Claim("deit-t-1280", "figure 4a", "deit-t, 1,280 px, images/s over softmax", "rate", *beside("deit-t", 1280, 16),
          at_least=1.0),
    Claim("swin-t-1280", "table 1", "swin-t, 1,280 px, images/s over softmax, share as at 224", "rate",
          *beside("swin-t", 1280, 16), at_least=1367 / 1511),
    share("pvt-s", 1216, 1873),
    share("pvtv2-b0", 3616, 4585),
    share("pvtv2-b1", 1806, 2484),
    share("swin-s", 825, 915),
    share("swin-b", 600, 661),
    share("swin-b", 200, 210, 384, 64),
    Claim("classes", "table 1", "accuracy of DeiT, PVT, PVTv2 and Swin", needs="ImageNet-1K, 300 epochs"),
    Claim("dense", "table 2", "detection and segmentation", needs="COCO, ADE20K"),
    Claim("ablation", "table 4", "gates, convolution and output gate by accuracy", needs="ImageNet-1K, 300 epochs"),
    Claim("rank", "figure 5", "ranks of K'V before and after gates", needs="its models trained on ImageNet-1K"),
)  # fmt: skip
