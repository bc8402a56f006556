"""Laws kept per cell, and the sheets that show them: the numbers are right, and so are the colours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toy

from underdraw import Pipeline
from underdraw.drafters.forced import Forced
from underdraw.engine.decode import decode
from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.images import MARGIN, PANEL, apply_colormap, heatmap
from underdraw.policies.fixed import NoTree
from underdraw.registry import policies
from underdraw.sampling import Sampler
from underdraw.verifiers.exact import Exact


def kept(policy: str, layout: object, *, temperature: float, seeds: tuple[int, ...] = (3, 4)) -> list[History]:
    of = toy.target()
    sampler = Sampler(layout, seeds, temperature=temperature, top_k=12)  # type: ignore[arg-type]
    histories = [History(layout) for _ in seeds]  # type: ignore[arg-type]
    drafter = Forced() if policy == "none" else toy.eagle(of)
    for _ in decode(
        of, drafter, policies.build(policy), Exact(), toy.prompts(len(seeds)), sampler, guidance=2.0,
        histories=histories, token_stats="keep",
    ):  # fmt: skip
        pass
    return histories


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layout", [toy.PLAIN, toy.ROW_ENDS], ids=["plain", "row-ends"])
def test_trees_and_single_tokens_keep_the_same_laws(layout: object, temperature: float) -> None:
    plain = kept("none", layout, temperature=temperature)
    for policy in ("confidence:depth=4,top_k=4,nodes=20", "chain:depth=3"):
        for one, other in zip(plain, kept(policy, layout, temperature=temperature), strict=True):
            for name in ("tokens", "entropy", "top1"):
                assert np.array_equal(one.grid(name), other.grid(name)), name


def test_laws_are_those_that_are_drawn_from() -> None:
    """Against a direct computation: filtered logits of every cell, gathered while decoding plainly."""
    of, layout = toy.target(), toy.PLAIN
    sampler = Sampler(layout, (3,), temperature=0.8, top_k=12)
    session = of.open(toy.prompts(1), layout, guidance=2.0)
    logits, run = [session.prefill.logits[0, 0]], type(session).forward

    def noted(self: object, tree: object, steps: object) -> object:
        output = run(self, tree, steps)  # type: ignore[arg-type]
        logits.append(output.logits[0, 0])
        return output

    history = History(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(session), "forward", noted)
        options = {"guidance": 2.0, "histories": [history]}
        list(decode(of, Forced(), NoTree(), Exact(), toy.prompts(1), sampler, token_stats="keep", **options))  # type: ignore[arg-type]
    law = torch.distributions.Categorical(logits=sampler.filter_logits(torch.stack(logits)).clamp(min=-1e9).double())
    assert len(logits) == layout.cells
    assert np.allclose(history.grid("entropy").flatten(), law.entropy(), atol=1e-5)
    assert np.allclose(history.grid("top1").flatten(), law.probs.amax(-1), atol=1e-6)
    assert (law.probs > 0).sum(-1).max() == 12


def test_nothing_is_kept_unless_asked_for(pipe: Pipeline) -> None:
    history = pipe("fox", seed=1).history
    assert np.isnan(history.entropy).all() and np.isnan(history.top1).all()
    other = pipe("fox", seed=1, token_stats="keep").history
    assert np.isfinite(other.grid("entropy")).all() and (other.grid("top1") <= 1).all()
    assert history.tokens.tolist() == other.tokens.tolist() and history.depth.tolist() == other.depth.tolist()


def middle(sheet: np.ndarray, panel: int, row: int, col: int, side: int) -> np.ndarray:
    """The colour in the middle of a cell of a panel; panels start under a heading and a title."""
    cell = PANEL / side
    top = MARGIN + 18 + 12 + 18 + 8
    x = MARGIN + panel * (PANEL + MARGIN) + (col + 0.5) * cell
    return sheet[int(top + (row + 0.5) * cell), int(x)]


def test_colours_say_what_the_history_says(pipe: Pipeline) -> None:
    pipe.tree = "adjacency:init=both,nodes=16"
    history = pipe("fox", seed=1, token_stats="keep").history
    sheet = np.asarray(heatmap(history))
    side = history.layout.width
    for panel, name, high in ((0, "accepted", None), (1, "depth", None), (2, "entropy", None), (3, "top1", 1.0)):
        values = history.grid(name).astype(float)
        top = high or values.max()
        for row in range(side):
            for col in range(side):
                shown = middle(sheet, panel, row, col, side)
                if (row, col) == (0, 0) and panel < 2:
                    assert (shown == 150).all()  # came with the prompt
                else:
                    expected = apply_colormap(values[row, col] / top)
                    assert np.abs(shown.astype(int) - expected).max() <= 1, (name, row, col)


def test_panels_for_what_is_known(pipe: Pipeline) -> None:
    out = pipe("fox", seed=1)
    assert out.heatmap().width == MARGIN + 3 * (PANEL + MARGIN)  # the picture, accepted, depth
    assert out.history.heatmap().width == MARGIN + 2 * (PANEL + MARGIN)
    assert pipe("fox", seed=1, token_stats="keep").heatmap().width == MARGIN + 5 * (PANEL + MARGIN)
    with pytest.raises(ConfigError, match="nothing to show"):
        History(out.history.layout).heatmap()
    with pytest.raises(ConfigError, match="output_type='pil'"):
        pipe("fox", seed=1, output_type="codes").heatmap()


def test_the_picture_shows_through(pipe: Pipeline) -> None:
    out = pipe("fox", seed=1)
    over, bare = np.asarray(out.heatmap()), np.asarray(out.history.heatmap())
    over = over[:, PANEL + MARGIN :]  # without the panel of the picture itself
    assert over.shape == bare.shape and (over[100:300] != bare[100:300]).any()
    assert (over[-40:] == bare[-40:]).all()  # the legend is the same


def test_unfinished_pictures_have_maps(pipe: Pipeline) -> None:
    out = pipe(
        "fox", seed=1, callback_on_step_end=lambda pipe, index, cell, known: pipe.interrupt() if index > 3 else 0
    )
    sheet = np.asarray(out.history.heatmap())
    assert (middle(sheet, 0, 5, 5, 6) == 150).all()  # not drawn
