"""Token statistics per cell, and heat maps: numbers and colours are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import toy_models
from PIL import Image

from underdraw import Pipeline
from underdraw.drafters.forced import Forced
from underdraw.engine.decode import decode
from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.images import MARGIN, PANEL, apply_colormap, contact_sheet, heatmap, pixels_to_images
from underdraw.policies.fixed import NoTree
from underdraw.registry import policies
from underdraw.sampling import Sampler
from underdraw.verifiers.exact import Exact


def decode_histories(
    policy: str, layout: object, *, temperature: float, seeds: tuple[int, ...] = (3, 4)
) -> list[History]:
    target = toy_models.target()
    sampler = Sampler(layout, seeds, temperature=temperature, top_k=12)  # type: ignore[arg-type]
    histories = [History(layout) for _ in seeds]  # type: ignore[arg-type]
    drafter = Forced() if policy == "none" else toy_models.eagle(target)
    options = {"guidance": 2.0, "histories": histories, "token_stats": "keep"}
    for _ in decode(
        target, drafter, policies.build(policy), Exact(), toy_models.prompts(len(seeds)), sampler, **options
    ):  # type: ignore[arg-type]
        pass
    return histories


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layout", [toy_models.PLAIN, toy_models.ROW_ENDS], ids=["plain", "row-ends"])
def test_token_stats_do_not_depend_on_the_tree(layout: object, temperature: float) -> None:
    plain = decode_histories("none", layout, temperature=temperature)
    for policy in ("confidence:depth=4,top_k=4,nodes=20", "chain:depth=3"):
        for expected, history in zip(plain, decode_histories(policy, layout, temperature=temperature), strict=True):
            for name in ("tokens", "entropy", "top1"):
                assert np.array_equal(expected.grid(name), history.grid(name)), name


def test_token_stats_match_a_direct_computation() -> None:
    """From the filtered logits of every cell, collected during plain decoding."""
    target, layout = toy_models.target(), toy_models.PLAIN
    sampler = Sampler(layout, (3,), temperature=0.8, top_k=12)
    session = target.open(toy_models.prompts(1), layout, guidance=2.0)
    logits, forward = [session.prefill.logits[0, 0]], type(session).forward

    def recording_forward(self: object, tree: object, steps: object) -> object:
        output = forward(self, tree, steps)  # type: ignore[arg-type]
        logits.append(output.logits[0, 0])
        return output

    history = History(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(session), "forward", recording_forward)
        options = {"guidance": 2.0, "histories": [history]}
        list(decode(target, Forced(), NoTree(), Exact(), toy_models.prompts(1), sampler, token_stats="keep", **options))  # type: ignore[arg-type]
    distribution = torch.distributions.Categorical(
        logits=sampler.filter_logits(torch.stack(logits)).clamp(min=-1e9).double()
    )
    assert len(logits) == layout.cells
    assert np.allclose(history.grid("entropy").flatten(), distribution.entropy(), atol=1e-5)
    assert np.allclose(history.grid("top1").flatten(), distribution.probs.amax(-1), atol=1e-6)
    assert (distribution.probs > 0).sum(-1).max() == 12


def test_token_stats_are_recorded_on_request_only(pipe: Pipeline) -> None:
    history = pipe("fox", seed=1).history
    assert np.isnan(history.entropy).all() and np.isnan(history.top1).all()
    with_stats = pipe("fox", seed=1, token_stats="keep").history
    assert np.isfinite(with_stats.grid("entropy")).all() and (with_stats.grid("top1") <= 1).all()
    assert history.tokens.tolist() == with_stats.tokens.tolist()
    assert history.depth.tolist() == with_stats.depth.tolist()


def cell_colour(sheet: np.ndarray, panel: int, row: int, col: int, side: int) -> np.ndarray:
    """The colour in the middle of a cell of a panel; panels start below a heading and a title."""
    cell = PANEL / side
    top = MARGIN + 18 + 12 + 18 + 8
    x = MARGIN + panel * (PANEL + MARGIN) + (col + 0.5) * cell
    return sheet[int(top + (row + 0.5) * cell), int(x)]


def test_colours_match_the_history(pipe: Pipeline) -> None:
    pipe.drafter, pipe.tree = toy_models.near(pipe.model.target), "adjacency:init=both,nodes=16"
    history = pipe("fox", seed=1, token_stats="keep").history
    assert history.accepted.max() > 0
    sheet = np.asarray(heatmap(history))
    side = history.layout.width
    for panel, name, high in ((0, "accepted", None), (1, "depth", None), (2, "entropy", None), (3, "top1", 1.0)):
        values = history.grid(name).astype(float)
        top = high or values.max()
        for row in range(side):
            for col in range(side):
                shown = cell_colour(sheet, panel, row, col, side)
                if (row, col) == (0, 0) and panel < 2:
                    assert (shown == 150).all()  # sampled from the prefill
                else:
                    expected = apply_colormap(values[row, col] / top)
                    assert np.abs(shown.astype(int) - expected).max() <= 1, (name, row, col)


def test_panels_without_values_are_left_out(pipe: Pipeline) -> None:
    out = pipe("fox", seed=1)
    assert out.heatmap().width == MARGIN + 3 * (PANEL + MARGIN)  # image, accepted, depth
    assert out.history.heatmap().width == MARGIN + 2 * (PANEL + MARGIN)
    assert pipe("fox", seed=1, token_stats="keep").heatmap().width == MARGIN + 5 * (PANEL + MARGIN)
    with pytest.raises(ConfigError, match="nothing to show"):
        History(out.history.layout).heatmap()
    with pytest.raises(ConfigError, match="output_type='pil'"):
        pipe("fox", seed=1, output_type="codes").heatmap()


def test_heatmap_is_drawn_over_the_image(pipe: Pipeline) -> None:
    out = pipe("fox", seed=1)
    blended, plain = np.asarray(out.heatmap()), np.asarray(out.history.heatmap())
    blended = blended[:, PANEL + MARGIN :]  # without the panel of the image
    assert blended.shape == plain.shape and (blended[100:300] != plain[100:300]).any()
    assert (blended[-40:] == plain[-40:]).all()  # the legend


def test_heatmap_of_an_interrupted_decode(pipe: Pipeline) -> None:
    out = pipe(
        "fox", seed=1, callback_on_step_end=lambda pipe, index, cell, state: pipe.interrupt() if index > 3 else 0
    )
    sheet = np.asarray(out.history.heatmap())
    assert (cell_colour(sheet, 0, 5, 5, 6) == 150).all()  # no token yet


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_contact_sheet_holds_all_images_and_captions(tmp_path: Path, suffix: str) -> None:
    pixels = torch.linspace(-1, 1, 3)[:, None, None, None].expand(3, 3, 8, 12)
    images = pixels_to_images(pixels)
    assert [image.getpixel((0, 0)) for image in images] == [(0, 0, 0), (128, 128, 128), (255, 255, 255)]
    path = contact_sheet(images, tmp_path / "new" / f"sheet{suffix}", captions=["a fox"] * 3, per_row=2, width=24)
    with Image.open(path) as sheet:
        assert sheet.size == (2 * (24 + 4), 2 * (16 + 4 + 4 * 11 + 4))
        values = np.asarray(sheet.convert("L")).astype(int)
    assert values[4:12, 4:20].max() < 20 and abs(values[4:12, 32:48] - 128).max() < 20  # the first two images
    assert values[16:60, :24].min() < 128, "the caption is drawn below its image"
