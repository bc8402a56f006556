"""ComfyUI nodes (V3 API): load a model of underdraw, and draw with it."""

from __future__ import annotations

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
DEFAULT = -1  # of a number: what the model's authors recommend
MAX_SEED = 2**53 - 1  # the largest whole number that the browser keeps exactly
PREVIEW_SIZE = 512


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
                io.String.Input("drafter", default="auto", tooltip="auto, jacobi, or a folder with a trained drafter"),
                io.String.Input("tree", default="auto", tooltip="auto, none (plain decoding), or a tree policy"),
                io.Combo.Input("weights", options=["auto", "full", "int8", "fp8", "int4"], default="auto"),
                io.Combo.Input("dtype", options=["auto", "float32", "bfloat16", "float16"], default="auto"),
                io.Combo.Input("device", options=["auto", "cuda", "cpu"], default="auto"),
            ],
            outputs=[UnderdrawModel.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model: str, drafter: str, tree: str, weights: str, dtype: str, device: str) -> Any:
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
                io.String.Input("negative_prompt", multiline=True, default=""),
                io.Int.Input("seed", default=0, min=0, max=MAX_SEED, control_after_generate=True),
                io.Int.Input("images", default=1, min=1, max=64),
                io.Int.Input("width", default=0, min=0, max=8192),
                io.Int.Input("height", default=0, min=0, max=8192),
                io.Float.Input("guidance", default=DEFAULT, min=DEFAULT, max=30, step=0.1),
                io.Float.Input("temperature", default=DEFAULT, min=DEFAULT, max=10, step=0.05),
                io.Int.Input("top_k", default=DEFAULT, min=DEFAULT, max=1_000_000),
                io.Float.Input("top_p", default=DEFAULT, min=DEFAULT, max=1, step=0.01),
                io.Int.Input("preview_every", default=4, min=0, max=1000, tooltip="passes between previews; 0: none"),
            ],
            outputs=[
                io.Image.Output(display_name="image"),
                io.Image.Output(display_name="acceptance map", tooltip="bright: many drafted tokens were accepted"),
                io.String.Output(display_name="statistics"),
            ],
        )

    @classmethod
    def execute(cls, model: Pipeline, prompt: str, seed: int, images: int, preview_every: int, **options: Any) -> Any:
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
    negative_prompt: str, width: int, height: int, guidance: float, temperature: float, top_k: int, top_p: float
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

    def __call__(self, pipe: Pipeline, pass_index: int, step: int, details: dict[str, Any]) -> None:
        result, history = details["step"], details["history"]
        self.histories[result.sequence] = history
        self.done += len(result.tokens)
        preview = None
        if self.preview_every and history.passes % self.preview_every == 0:
            unfinished = next((other for other in self.histories.values() if not other.done), history)
            preview = ("JPEG", pipe.decode_images([unfinished])[0], PREVIEW_SIZE)
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
