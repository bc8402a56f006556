"""What the grading scripts share: their options, and images of many prompts as codes with the model's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from underdraw.bench.records import record_sections
from underdraw.bench.report import to_markdown
from underdraw.cli import options
from underdraw.cli.outputs import check_file
from underdraw.cli.progress import drafted_tokens, progress_bar
from underdraw.io import atomic_write_json
from underdraw.pipeline import Pipeline

Batch = Annotated[int, typer.Option(min=1, metavar="COUNT", help="Images generated at once.")]


@dataclass(frozen=True, kw_only=True)
class GradingOptions(options.OutputOptions, options.ModelOptions):
    """The model that is graded, and what is written."""

    out: Annotated[Path, typer.Option("--out", "-o", metavar="JSON", help="Result to write.")]
    drafter: options.Drafter = "auto"
    batch: Batch = 1
    sheet: Annotated[Path | None, typer.Option(metavar="IMAGE", help="Also write a contact sheet.")] = None

    def check(self) -> None:
        """Raise if a file exists, or could not be written."""
        for path in (self.out, self.sheet):
            if path is not None:
                check_file(path)

    def load(self) -> Pipeline:
        loading = {**options.values_of(options.ModelOptions, self), "drafter": self.drafter, "verifier": "exact"}
        return options.load_pipeline(**loading, silent=self.silent)[0]

    def save(self, record: dict[str, Any]) -> None:
        """Write the result and print its tables."""
        atomic_write_json(self.out, record)
        self.print(f"{to_markdown(record_sections(record))}\n\n{self.out}", record)


@dataclass(frozen=True, slots=True)
class GeneratedCodes:
    """Codes of images, and the means of entropy (nats) and top-1 probability over their tokens, if recorded."""

    codes: Tensor  # (N, H, W) int64, on the CPU
    entropy: float
    top1: float


def generate_codes(
    pipe: Pipeline, texts: Sequence[str], seeds: Sequence[int], batch: int, *, silent: bool = True, **settings: Any
) -> GeneratedCodes:
    """Generate an image for every prompt and seed, `batch` at a time; `settings` are those of the pipeline's call."""
    layout = pipe.model.make_layout(pipe.model.sizes[0])
    codes, entropy, top1 = [], [], []
    pipe.set_progress_bar_config(disable=True)
    with progress_bar(drafted_tokens(layout) * len(texts), silent=silent) as advance:
        for start in range(0, len(texts), batch):
            part = slice(start, start + batch)
            out = pipe(
                list(texts[part]), seed=list(seeds[part]), output_type="codes", callback_on_step_end=advance, **settings
            )
            codes.append(torch.as_tensor(out.images).cpu())
            entropy += [np.nanmean(history.entropy) for history in out.histories if not np.isnan(history.entropy).all()]
            top1 += [np.nanmean(history.top1) for history in out.histories if not np.isnan(history.top1).all()]
    means = (float(np.mean(values)) if values else float("nan") for values in (entropy, top1))
    return GeneratedCodes(torch.cat(codes), *means)


@torch.inference_mode()
def decode_codes(pipe: Pipeline, codes: Tensor, batch: int = 8) -> Tensor:
    """Pixels (N, 3, H, W) in [0, 1] of codes."""
    decode = pipe.model.image_tokenizer.decode
    parts = [decode(part.to(pipe.device)).float().cpu() for part in codes.split(batch)]
    return (torch.cat(parts) * 0.5 + 0.5).clamp(0, 1)
