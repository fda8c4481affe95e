"""Report which packages, devices and services this machine has. A missing one is reported, never an exception."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from .errors import ResourceError, existing_folder
from .extras import checkout, required, with_extra
from .terminal.output import size
from .terminal.progress import progress

# What the extras are for, as docs/install.md says at length.
PURPOSES = {
    "train": "data of the Hub, .zst and .parquet",
    "deepspeed": "ZeRO-3",
    "vision": "images",
    "augment": "data.augment: randaugment",
    "diffusers": "diffusion pipelines",
    "company": "eval --tasks, TRL, torchao, bitsandbytes",
    "vllm": "serving many requests",
    "onnx": "export to ONNX",
    "gguf": "export to GGUF",
    "mlx": "comparing exports with MLX",
    "docs": "building the documentation",
}
# What tests need, not users.
DEVELOPMENT = ("test",)
# How long the Hub has to answer.
SECONDS = 3


def examine() -> dict[str, Any]:
    """Everything that `linearize doctor` reports, as JSON; `missing` lists what is needed and not there.

    Raises LinearizeError (exit 4) for sources that are not installed: what they need is in the package's metadata.
    """
    try:
        distribution = importlib.metadata.distribution("linearize")
    except importlib.metadata.PackageNotFoundError:
        raise ResourceError(
            "linearize runs from its sources, so what it needs is unknown. Install it: pip install -e ."
        ) from None
    needed, packages = [*required(distribution)], [_python(distribution.metadata["Requires-Python"])]
    with progress("doctor", len(needed) + 1) as advance:
        for requirement in needed:  # to see whether they are whole some are imported, which takes nearly all the time
            packages.append(_package(requirement))
            advance(1)
        cuda = _cuda()
        servers, lacking = _servers()
        found = {
            "packages": packages,
            "checkout": checkout(distribution),
            "extras": dict(_extras(distribution)),
            "cuda": cuda,
            "triton": _triton(packages, cuda),
            "servers": servers,
            "server_lacks": lacking,
            "disk": _disk(),
            "hub": _hub(),
            "missing": [package["problem"] for package in packages if package["problem"]],
        }
        advance(1)
    return found


def _python(needed: str) -> dict[str, Any]:
    version = platform.python_version()
    wrong = not SpecifierSet(needed).contains(version, prereleases=True)
    problem = f"python {version} is not {needed}" if wrong else ""
    return {"name": "python", "needed": needed, "version": version, "problem": problem}


def _package(requirement: Requirement) -> dict[str, Any]:
    """A package: the version found, and what is wrong with it (empty when nothing is)."""
    name, problem, version = requirement.name, "", None
    try:
        version = importlib.metadata.version(name)
        if not requirement.specifier.contains(version, prereleases=True):
            problem = f'{name} {version} is not {requirement.specifier}: pip install "{name}{requirement.specifier}"'
        elif name in ("torch", "transformers", "accelerate", "peft", "triton"):
            importlib.import_module(name)
    except importlib.metadata.PackageNotFoundError:
        problem = f'{name} is missing: pip install "{name}{requirement.specifier}"'
    except Exception as error:  # a broken installation raises as it likes
        problem = f"{name} {version} does not import ({type(error).__name__}: {error})"
    return {"name": name, "needed": str(requirement.specifier), "version": version, "problem": problem}


def _extras(distribution: importlib.metadata.Distribution) -> Iterator[tuple[str, list[str]]]:
    """Each optional extra, and the packages of it that are missing or out of range."""
    for extra in distribution.metadata.get_all("Provides-Extra") or ():
        if extra not in DEVELOPMENT:
            yield extra, [p["name"] for p in map(_package, required(distribution, extra)) if p["problem"]]


def _cuda() -> dict[str, Any]:
    """Devices that torch sees, with capability and memory in bytes."""
    try:
        import torch

        devices = []
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            capability = f"{found.major}.{found.minor}"
            devices.append({"name": found.name, "capability": capability, "free": free, "total": total})
        return {"version": torch.version.cuda, "devices": devices}
    except Exception as error:  # no torch, or a driver that does not answer
        return {"version": None, "devices": [], "problem": f"{type(error).__name__}: {error}"}


def _triton(packages: list[dict[str, Any]], cuda: dict[str, Any]) -> dict[str, Any]:
    """Whether the Triton kernels run here, and why not; without them the PyTorch path does."""
    found = next((p for p in packages if p["name"] == "triton"), None)
    reason = ""
    if found is None or found["problem"]:
        reason = found["problem"] if found else f"no triton for {platform.system()} {platform.machine()}"
    elif not cuda["devices"]:
        reason = "no CUDA device"
    return {"used": not reason, "reason": reason}


def _servers() -> tuple[list[str], list[str]]:
    """What `linearize serve` can start here, and what transformers' own server lacks."""
    try:
        from .serve.start import SERVERS, is_installed, lacks

        return [name for name in SERVERS if is_installed(name)], lacks()
    except Exception:  # torch or transformers is missing or broken, which their own lines say
        return [], []


def _disk() -> dict[str, int]:
    """Free bytes where outputs go by default, where downloads go, and where the system keeps temporary files."""
    import tempfile

    places = [Path(), _cache(), Path(tempfile.gettempdir())]
    return {str(place.resolve()): shutil.disk_usage(existing_folder(place.resolve())).free for place in places}


def _cache() -> Path:
    """Where downloads go."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(HF_HUB_CACHE)
    except Exception:  # said by _hub; this is where the default would be
        return Path("~/.cache/huggingface/hub").expanduser()


def _hub() -> dict[str, Any]:
    """Where the Hub is, whether it may be asked, and whether there is a token; never the token."""
    try:
        from huggingface_hub import constants, get_token
    except Exception as error:
        return {"problem": f"huggingface_hub does not import ({type(error).__name__}: {error})"}
    return {
        "endpoint": constants.ENDPOINT,
        "cache": str(_cache()),
        "offline": constants.HF_HUB_OFFLINE,
        "unreachable": "" if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT),
        "token": get_token() is not None,
    }


def _unreachable(endpoint: str) -> str:
    """Why the Hub does not answer within SECONDS; empty when it does, with whatever answer."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    return ""


def typed(state: str) -> str:
    """What was found, and on a line of its own the command to type, which a table would break between its words."""
    return state.replace(": pip install", ":\npip install")


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What `linearize doctor` found: a result (`ok`, `missing`, `optional` or `note`) and what it is of."""
    for package in found["packages"]:
        state = package["problem"] or f"{package['version']} (needs {package['needed'] or 'any'})"
        yield "missing" if package["problem"] else "ok", typed(f"{package['name']}: {state}")
    for extra, missing in found["extras"].items():
        remedy = with_extra(extra, found["checkout"])
        purpose = f" ({PURPOSES[extra]})" if extra in PURPOSES else ""  # metadata may be of another version
        state = f"without {', '.join(missing)}: {remedy}" if missing else "complete"
        yield "optional" if missing else "ok", typed(f"extra {extra}{purpose}: {state}")
    for device in found["cuda"]["devices"]:
        memory = f"{size(device['free'])} of {size(device['total'])} free"
        yield "ok", f"{device['name']}, capability {device['capability']}, {memory}"
    kernels = found["triton"]
    state = "used" if kernels["used"] else f"not used, {kernels['reason']}; the PyTorch path is correct, and slower"
    yield "ok" if kernels["used"] else "note", f"Triton kernels: {state}"
    servers = f"would start the server of {' or '.join(found['servers'])}"
    if not found["servers"]:
        servers = f"needs vllm, for many requests at a time: {with_extra('vllm', found['checkout'])}\n"
        lacking = f", without {', '.join(found['server_lacks'])}" if found["server_lacks"] else ""
        servers += f'or transformers, for one at a time{lacking}: pip install "transformers[serving]"'
    yield "ok" if found["servers"] else "optional", typed(f"linearize serve: {servers}")
    for place, free in found["disk"].items():
        yield "ok", f"disk: {size(free)} free in {place}"
    hub = found["hub"]
    if "problem" in hub:
        yield "missing", f"Hub: {hub['problem']}"
    else:
        token = "a token is set" if hub["token"] else "no token (hf auth login, for gated models and for uploads)"
        if hub["unreachable"]:
            why = f"cannot be reached ({hub['unreachable']}); local folders and cached models work"
            yield "note", f"Hub: {hub['endpoint']} {why}"
        else:
            yield "ok", f"Hub: {hub['endpoint']}{', offline' if hub['offline'] else ' answers'}; {token}"
