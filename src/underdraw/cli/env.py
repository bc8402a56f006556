"""`underdraw env`: versions, devices and kernels for bug reports; `--measure` measures the cost of passes again."""

from __future__ import annotations

import json as json_module
import platform
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from underdraw import __version__
from underdraw.cli import options
from underdraw.extras import package_version

if TYPE_CHECKING:
    from underdraw.pipeline import Pipeline

EXAMPLES = """
Examples:

underdraw env

underdraw env --json

underdraw env --measure --model tiny --drafter drafter-eagle
"""
PACKAGES = ("torch", "numpy", "pillow", "safetensors", "huggingface_hub", "typer", "rich", "tqdm", "transformers")
EXTRAS = {  # a package that each extra of pyproject.toml installs
    "families": "transformers",
    "glm-image": "diffusers",
    "formats": "pyarrow",
    "ray": "ray",
    "train": "accelerate",
    "serve": "fastapi",
    "bench": "matplotlib",
    "evaluate": "torchmetrics",
    "data": "resvg_py",
    "test": "pytest",
    "lint": "ruff",
    "docs": "mkdocs",
}
MAX_BATCH = 64  # `auto` uses the costs of this batch size for larger ones
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Measure = Annotated[
    bool, typer.Option("--measure", help="Measure again what passes cost here, which the tree `auto` depends on.")
]
Batch = Annotated[
    int, options.part_option(min=1, max=MAX_BATCH, metavar="COUNT", help=f"Images at once, 1 to {MAX_BATCH}.")
]


@app.command(epilog=EXAMPLES)
@options.grouped
def env(
    measure: Measure = False,
    batch: Batch = 1,
    drafter: options.Drafter = "auto",
    json: Json = False,
    *,
    model_options: options.ModelOptions,
    pass_options: options.PassOptions,
) -> None:
    """Print versions, devices and the kernels in use. With --measure, time passes of a model and store their cost."""
    if measure:
        pipe, _ = options.load_pipeline(
            **asdict(model_options), **asdict(pass_options), drafter=drafter, verifier="exact", silent=json
        )
        sections = {"costs": measure_costs(pipe, batch)}
    else:
        sections = {
            "versions": package_versions(),
            "system": system_info(),
            "devices": device_info(),
            "kernels": kernel_info(),
            "parts": registered_parts(),
        }
    if json:
        print(json_module.dumps(sections))
        return
    for title, values in sections.items():
        print(title)
        for key, value in values.items():
            print(f"  {key:16} {', '.join(map(str, value)) if isinstance(value, list) else value}")


def measure_costs(pipe: Pipeline, batch: int) -> dict[str, Any]:
    """Time passes, store the costs for the tree `auto`, and return them in milliseconds."""
    from underdraw.engine.autotune import WindowCosts, costs_file

    costs = pipe.measure_costs(batch)
    facts = {"model": pipe.model.name, "drafter": pipe.drafter_name, "images": batch}
    if isinstance(costs, WindowCosts):
        sizes = {"chain_ms": costs.chain, "tree_ms": costs.tree}  # by nodes of a pass
        by_nodes = {name: [f"{nodes}: {ms:g}" for nodes, ms in pairs] for name, pairs in sizes.items()}
        return {**facts, "images": costs.batch, **by_nodes, "busy": costs.is_busy, "stored_in": str(costs_file())}
    return {
        **facts,
        "plain_ms": costs.plain,  # a pass without a tree
        "base_ms": costs.base,  # a pass with a tree, without its nodes and levels
        "node_ms": costs.node,
        "level_ms": costs.level,
        "stored_in": str(costs_file()),
    }


def package_versions() -> dict[str, str]:
    """Versions of underdraw, Python and the packages it uses."""
    versions = {"underdraw": __version__, "python": platform.python_version()}
    return versions | {name: package_version(name) or "not installed" for name in PACKAGES}


def system_info() -> dict[str, Any]:
    """Operating system, processor and threads."""
    import torch

    from underdraw.engine.autotune import processor

    return {
        "platform": platform.platform(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def device_info() -> dict[str, str]:
    """The CPU and every GPU."""
    import torch

    devices = {"cpu": "float32, the same bits for every tree and batch"}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        devices[f"cuda:{index}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {capability}"
    return devices


def kernel_info() -> dict[str, str]:
    """The kernels for GEMMs, attention and convolutions on the device that `auto` chooses."""
    import torch

    if torch.cuda.is_available():
        from underdraw.nn.attention import triton_available

        cuda, cudnn = torch.version.cuda, torch.backends.cudnn.version()
        has_triton = triton_available(torch.device("cuda"))
        tf32 = "on" if torch.backends.cuda.matmul.allow_tf32 else "off"
        blas = f"cuBLAS (CUDA {cuda}), TF32 {tf32}"
        return {
            "device": "cuda",
            "matrices": f"row-invariant: underdraw's GEMM or {blas} without split-K" if has_triton else blas,
            "attention": "underdraw's tree attention" if has_triton else "torch scaled_dot_product_attention",
            "convolutions": f"cuDNN {cudnn}",
        }
    from underdraw.nn.row_invariant import min_rows, prefers_onednn, row_multiple, sum_block

    blas = "MKL" if torch.backends.mkl.is_available() else "the BLAS that torch was built with"
    matrices = f"{blas}, row-invariant: input-major, at least {min_rows()} rows, a multiple of {row_multiple()}"
    if torch.backends.mkldnn.is_available() and prefers_onednn(torch.float32):
        matrices = f"oneDNN, row-invariant; small ones {matrices}"
    return {
        "device": "cpu",
        "matrices": matrices,
        "attention": f"in blocks of {sum_block(2)} positions, summed in one order for trees and tokens",
        "convolutions": "oneDNN" if torch.backends.mkldnn.is_available() else "torch",
    }


def registered_parts() -> dict[str, Any]:
    """Families, tree policies, verifiers, drafters and installed extras."""
    from underdraw.registry import drafters, families, policies, verifiers

    return {
        "families": families.names(),
        "policies": policies.names(),
        "verifiers": verifiers.names(),
        "drafters": ["of the model", *drafters.names()],
        "extras": [name for name, package in EXTRAS.items() if find_spec(package)] or ["none"],
    }
