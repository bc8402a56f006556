"""ComfyUI nodes (V3 API): load a model of underdraw, and draw with it."""

from __future__ import annotations

import time
from typing import Any

import comfy.utils
import numpy as np
import torch
from comfy_api.latest import ComfyExtension, io

from underdraw import Pipeline
from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.images import apply_colormap

UnderdrawModel = io.Custom("UNDERDRAW_MODEL")  # a Pipeline
CATEGORY = "underdraw"
# Optional inputs are shown with their defaults like the others, but a workflow in the API format may leave them out.
AUTO: dict[str, Any] = {"default": "auto", "optional": True}
DEFAULT = -1  # of a number: what the model's authors recommend
DEFAULT_NUMBER: dict[str, Any] = {"default": DEFAULT, "min": DEFAULT, "optional": True}
DEFAULT_SIDE: dict[str, Any] = {"default": 0, "min": 0, "max": 8192, "optional": True}
MAX_SEED = 2**53 - 1  # the largest whole number that the browser keeps exactly
PREVIEW_SIZE, PREVIEW_EVERY = 512, 4  # pixels; passes
PREVIEW_SHARE = 0.2  # of the time may go to previews; on a CPU one takes as long as fifty passes


class LoadModel(io.ComfyNode):
    """Loads a checkpoint; ComfyUI keeps it until an input changes."""

    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="UnderdrawLoadModel",
            display_name="Load Model (underdraw)",
            category=CATEGORY,
            description="Load an autoregressive image model with its drafter.",
            inputs=[
                io.String.Input("model", default="tiny", tooltip="tiny, a folder, or owner/name of the hub"),
                io.String.Input("drafter", tooltip="auto, jacobi, or a folder with a trained drafter", **AUTO),
                io.String.Input("tree", tooltip="auto, none (plain decoding), or a tree policy", **AUTO),
                io.Combo.Input("weights", options=["auto", "full", "int8", "fp8", "int4"], **AUTO),
                io.Combo.Input("dtype", options=["auto", "float32", "bfloat16", "float16"], **AUTO),
                io.Combo.Input("device", options=["auto", "cuda", "cpu"], **AUTO),
            ],
            outputs=[UnderdrawModel.Output(display_name="model")],
        )

    @classmethod
    def execute(
        cls,
        model: str,
        drafter: str = "auto",
        tree: str = "auto",
        weights: str = "auto",
        dtype: str = "auto",
        device: str = "auto",
    ) -> Any:
        with torch.inference_mode(False):  # ComfyUI runs nodes in inference mode, whose tensors autograd refuses
            pipe = Pipeline.from_pretrained(
                model, drafter=drafter, tree=tree, weights=weights, dtype=dtype, device=device
            )
        pipe.set_progress_bar_config(disable=True)
        return io.NodeOutput(pipe)


class Draw(io.ComfyNode):
    """Draws images of a prompt: pictures, acceptance maps of the same size, and a line of statistics."""

    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="UnderdrawDraw",
            display_name="Draw (underdraw)",
            category=CATEGORY,
            description="Draw images; -1 (and 0 for the size) stands for the model's default.",
            inputs=[
                UnderdrawModel.Input("model"),
                io.String.Input("prompt", multiline=True, default="a red fox"),
                io.String.Input("negative_prompt", multiline=True, default="", optional=True),
                io.Int.Input("seed", default=0, min=0, max=MAX_SEED, control_after_generate=True),
                io.Int.Input("images", default=1, min=1, max=64, optional=True),
                io.Int.Input("width", **DEFAULT_SIDE),
                io.Int.Input("height", **DEFAULT_SIDE),
                io.Float.Input("guidance", max=30, step=0.1, **DEFAULT_NUMBER),
                io.Float.Input("temperature", max=10, step=0.05, **DEFAULT_NUMBER),
                io.Int.Input("top_k", max=1_000_000, **DEFAULT_NUMBER),
                io.Float.Input("top_p", max=1, step=0.01, **DEFAULT_NUMBER),
                io.Int.Input(
                    "preview_every",
                    default=PREVIEW_EVERY,
                    min=0,
                    max=1000,
                    tooltip="passes between previews, more if they take long; 0: none",
                    optional=True,
                ),
            ],
            outputs=[
                io.Image.Output(display_name="image"),
                io.Image.Output(display_name="acceptance map", tooltip="bright: many drafted tokens were accepted"),
                io.String.Output(display_name="statistics"),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Pipeline,
        prompt: str,
        seed: int,
        images: int = 1,
        preview_every: int = PREVIEW_EVERY,
        **options: Any,
    ) -> Any:
        if not isinstance(model, Pipeline):
            raise ConfigError("connect the model of a Load Model (underdraw) node to the input model.")
        if type(preview_every) is not int or preview_every < 0:
            raise ConfigError(f"preview_every {preview_every!r} must be a whole number of passes; 0 shows no previews.")
        request = model.request(prompt, num_images_per_prompt=images, seed=seed, **_request_options(**options))
        layout = model.model.make_layout(request.size)
        progress = Progress(images * (layout.stop - layout.start - 1), preview_every)
        out = model.generate(request, output_type="np", callback_on_step_end=progress)
        height, width = out.images.shape[1:3]
        maps = np.stack([acceptance_map(history, height, width) for history in out.histories])
        stats = f"{out.stats.tokens_per_pass:.2f} tokens per pass, {out.stats.passes} passes, {out.stats.seconds:.2f} s"
        return io.NodeOutput(torch.from_numpy(out.images).float(), torch.from_numpy(maps), stats)


def _request_options(
    negative_prompt: str = "",
    width: int = 0,
    height: int = 0,
    guidance: float = DEFAULT,
    temperature: float = DEFAULT,
    top_k: int = DEFAULT,
    top_p: float = DEFAULT,
) -> dict[str, Any]:
    """The arguments of `Pipeline.request`, which checks them; None is the model's default."""
    values = {
        "negative_prompt": (negative_prompt, ""),
        "width": (width, 0),
        "height": (height, 0),
        "guidance_scale": (guidance, DEFAULT),
        "temperature": (temperature, DEFAULT),
        "top_k": (top_k, DEFAULT),
        "top_p": (top_p, DEFAULT),
    }
    return {
        name: None if type(value) in (int, float, str) and value == default else value
        for name, (value, default) in values.items()
    }


class Progress:
    """Shows tokens drawn so far and a preview; ComfyUI's hook raises an exception here when the user cancels."""

    def __init__(self, tokens: int, preview_every: int) -> None:
        self.total, self.done, self.preview_every = tokens, 0, preview_every
        self.bar = comfy.utils.ProgressBar(tokens)
        self.histories: dict[int, History] = {}
        self.started, self.preview_seconds = time.perf_counter(), 0.0

    def __call__(self, pipe: Pipeline, pass_index: int, step: int, details: dict[str, Any]) -> None:
        result, history = details["step"], details["history"]
        self.histories[result.sequence] = history
        self.done += len(result.tokens)
        preview, start = None, time.perf_counter()
        is_due = self.preview_every and history.passes % self.preview_every == 0
        unfinished = next((other for other in self.histories.values() if not other.done), None)
        # None after the last pass: the image itself follows, whose pixels may take a diffusion model.
        if is_due and unfinished and self.preview_seconds <= PREVIEW_SHARE * (start - self.started):
            preview = ("JPEG", pipe.decode_images([unfinished])[0], PREVIEW_SIZE)
            self.preview_seconds += time.perf_counter() - start
        self.bar.update_absolute(min(self.done, self.total), self.total, preview)


def acceptance_map(history: History, height: int, width: int) -> np.ndarray:
    """RGB (height, width, 3) in [0, 1]: how many drafted tokens the pass of each cell accepted; bright is many."""
    accepted = history.grid("accepted").astype(np.float32).clip(min=0)  # (rows, cols)
    colours = apply_colormap(accepted / max(1.0, float(accepted.max()))).astype(np.float32) / 255
    rows = np.arange(height) * accepted.shape[0] // height
    cols = np.arange(width) * accepted.shape[1] // width
    return colours[rows][:, cols]


class UnderdrawExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [LoadModel, Draw]


async def comfy_entrypoint() -> ComfyExtension:
    """What ComfyUI calls to find the nodes."""
    return UnderdrawExtension()
