"""Files of latents, and where `eval` writes its picture of a pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from conftest import Command, holds
from safetensors.torch import save_file

from linearize.diffusion.latents import read_tensor
from linearize.errors import Exit


@pytest.mark.parametrize("name", ["a.npy", "A.NPY", "b.pt", "B.Pt", "c.safetensors", "C.SAFETENSORS"])
def test_a_suffix_may_be_in_capitals(tmp_path: Path, name: str) -> None:
    values, path = torch.arange(6.0).view(2, 3), tmp_path / name
    if path.suffix.lower() == ".npy":
        with path.open("wb") as file:
            numpy.save(file, values.numpy())
    elif path.suffix.lower() == ".pt":
        torch.save(values, path)
    else:
        save_file({"latents": values}, path)
    assert torch.equal(read_tensor(path), values)


def test_a_picture_replaces_no_folder_and_no_text(linearize: Command, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "DiTPipeline", "_diffusers_version": "0.42"}')
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "notes.png").write_text("mine")
    for name, message in (("folder", ("is", "folder")), ("notes", ("no", "picture"))):
        code, _, err = linearize("eval", tmp_path, "-o", tmp_path / f"{name}.json")
        assert (code, holds(err, *message)) == (Exit.USAGE, True), err
    assert (tmp_path / "notes.png").read_text() == "mine"
