"""`underdraw env`: what is installed, which devices there are and which kernels would run. For bug reports."""

from __future__ import annotations

import json as serial
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from underdraw import __version__

PACKAGES = ("torch", "numpy", "pillow", "safetensors", "huggingface_hub", "typer", "rich", "tqdm", "transformers")
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command(epilog="Examples:\n\nunderdraw env\n\nunderdraw env --json")
def env(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print versions, devices and the kernels in use."""
    known = {"versions": versions(), "system": system(), "devices": devices(), "kernels": kernels(), "parts": parts()}
    if json:
        print(serial.dumps(known))
        return
    for title, values in known.items():
        print(title)
        for key, value in values.items():
            print(f"  {key:16} {', '.join(value) if isinstance(value, list) else value}")


def versions() -> dict[str, str]:
    found = {"underdraw": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def system() -> dict[str, Any]:
    import torch

    from underdraw.engine.autotune import processor

    return {
        "platform": platform.platform(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def devices() -> dict[str, str]:
    import torch

    found = {"cpu": "float32, the same bits for every tree and batch"}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        capability = f"compute capability {about.major}.{about.minor}"
        found[f"cuda:{index}"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {capability}"
    return found


def kernels() -> dict[str, str]:
    """What multiplies matrices and attends, on the device that `auto` chooses."""
    import torch

    if torch.cuda.is_available():
        from underdraw.nn.attention import triton_available

        cuda, cudnn = torch.version.cuda, torch.backends.cudnn.version()
        own = ", kernels of our own where they are faster" if triton_available(torch.device("cuda")) else ""
        return {
            "device": "cuda",
            "matrices": f"cuBLAS (CUDA {cuda}), TF32 {'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'}{own}",
            "attention": f"torch scaled_dot_product_attention{own}",
            "convolutions": f"cuDNN {cudnn}",
        }
    from underdraw.nn.row_invariant import block, fewest, multiple

    blas = "MKL" if torch.backends.mkl.is_available() else "the BLAS that torch was built with"
    convolutions = "oneDNN" if torch.backends.mkldnn.is_available() else "torch"
    return {
        "device": "cpu",
        "matrices": f"{blas}, input-major, at least {fewest()} rows, a multiple of {multiple()}: all round alike",
        "attention": f"by blocks of {block(torch.float32, 2)} sequence places, in one order for trees and tokens",
        "convolutions": convolutions,
    }


def parts() -> dict[str, Any]:
    from underdraw.registry import drafters, families, policies, verifiers

    known: dict[str, Any] = {
        "families": families.names(), "policies": policies.names(), "verifiers": verifiers.names(),
        "drafters": ["of the model", *drafters.names()],
    }  # fmt: skip
    extras = {
        "families": "transformers", "data": "pyarrow", "bench": "matplotlib", "evaluate": "torchmetrics",
        "test": "pytest", "lint": "ruff",
    }  # fmt: skip
    known["extras"] = [name for name, module in extras.items() if find_spec(module)] or ["none"]
    return known
