"""Fast autoregressive image generation: exact tree-speculative decoding.

Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Pipeline", "PipelineOutput", "__version__"]

if TYPE_CHECKING:
    from underdraw.output import PipelineOutput
    from underdraw.pipeline import Pipeline


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from underdraw.pipeline import Pipeline

        return Pipeline
    if name == "PipelineOutput":
        from underdraw.output import PipelineOutput

        return PipelineOutput
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
