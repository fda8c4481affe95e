"""Claims of "MHLA: Restoring Expressivity of Linear Attention via Token-Level Multi-Head" (arXiv 2601.07832).

Diffusion transformers are their blocks without what conditions them; the film model's latency in the paper is that of a
whole pipeline, with its text encoder and decoder of latents. An H100 is the paper's device too.
"""

from __future__ import annotations

from benchmarks.measured import Diffusion
from benchmarks.paper import Claim, Quantity

WAN = "faithful=true frames=3 rows=5 columns=7 normalise=false norm=head output_gate=true dwc=0"


def dit(tokens: int, side: int = 4, more: str = "dwc=0") -> Diffusion:
    return Diffusion(f"dit-{tokens}", "mhla", f"faithful=true rows={side} columns={side} {more}")


def softmax(run: Diffusion) -> Diffusion:
    return Diffusion(run.shape, blocks=run.blocks)


def linear(run: Diffusion) -> Diffusion:
    """Linear attention with one summary of all tokens."""
    return run._replace(mechanism="la", options="faithful=true")


def blocks(
    tokens: int, M: int, few: Diffusion, name: str, where: str, published: float, what: Quantity = "speed"
) -> Claim:
    about = f"DiT-S/2, {tokens:,} tokens, 4 blocks of tokens / {M}, {'peak of memory' if what == 'memory' else 'time'}"
    return Claim(name, where, about, what, dit(tokens, round(M**0.5)), few, published=published)


PLAIN, FULL, LONG = dit(1024), dit(1024, more="dwc=3 output_gate=true"), dit(4096)
FILM = Diffusion("wan", "mhla", WAN, blocks=3)
FEW, FEW_LONG = dit(1024, 2), dit(4096, 2)

CLAIMS = (
    Claim("512-px", "section 5.2", "DiT-S/2 at 512 px, images/s over softmax", "speed", PLAIN, softmax(PLAIN),
          published=2.0),
    Claim("512-px-full", "section 5.2", "the same with convolution and output gate", "speed", FULL, softmax(FULL),
          published=2.0),
    Claim("wan", "table 5", "Wan2.1-1.3B, 31,500 tokens, speed over softmax", "speed", FILM, softmax(FILM),
          published=166 / 81),
    Claim("wan-hybrid", "table 5", "the same, a third of the layers softmax", "speed",
          FILM._replace(softmax_every=3), softmax(FILM), published=166 / 103),
    Claim("wan-linear", "table 5", "MHLA over plain linear attention in Wan", "speed", FILM, linear(FILM),
          published=82 / 81),
    Claim("1024-px", "figure 1d", "DiT-S/2 at 1,024 px, 4,096 tokens, over softmax", "speed", LONG, softmax(LONG),
          at_least=1.0),
    Claim("linear", "figure 1b", "DiT-S/2 at 512 px, over plain linear attention", "speed", PLAIN, linear(PLAIN),
          at_least=0.95),
    Claim("linear-long", "figure 1b", "DiT-S/2 at 1,024 px, over plain linear attention", "speed", LONG, linear(LONG),
          at_least=0.95),
    blocks(1024, 16, FEW, "blocks-16", "table 7b", 435 / 435),
    blocks(1024, 64, FEW, "blocks-64", "table 7b", 408 / 435),
    blocks(1024, 256, FEW, "blocks-256", "table 14", 52 / 61),
    blocks(4096, 16, FEW_LONG, "long-16", "table 14", 147 / 145),
    blocks(4096, 64, FEW_LONG, "long-64", "table 14", 147 / 148),
    blocks(4096, 256, FEW_LONG, "long-256", "table 14", 147 / 157),
    blocks(4096, 1024, FEW_LONG, "long-1024", "table 14", 147 / 219),
    blocks(4096, 256, FEW_LONG, "long-256-memory", "table 14", 20.8 / 25.4, "memory"),
    Claim("classes", "table 2", "accuracy of DeiT and VLT", needs="ImageNet-1K, 300 epochs"),
    Claim("images", "table 3", "FID of DiT and DiG", needs="ImageNet-1K, 400k steps"),
    Claim("sana", "table 4", "FID, CLIP and GenEval of Sana", needs="its images and prompts, 40k steps"),
    Claim("vbench", "table 5", "VBench of Wan2.1", needs="video, VBench"),
    Claim("text", "table 6", "perplexity, MMLU and commonsense at 340M", needs="FineWeb-Edu, 10B tokens"),
    Claim("longbench", "table 8", "LongBench at 340M", needs="FineWeb-Edu, 10B tokens; LongBench"),
    Claim("start", "table 7a", "starts of the mixing weights by accuracy", needs="ImageNet-1K, 300 epochs"),
)  # fmt: skip
