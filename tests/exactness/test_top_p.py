"""Top-p cuts the same values wherever it runs: in a batch, in a captured or compiled pass, for any dtype and logits."""

from __future__ import annotations

import pytest
import torch
from replay_tape import Tape
from torch import Tensor

from underdraw.engine.slot_sampler import SamplingParams, SlotSampler
from underdraw.layout import Layout
from underdraw.sampling import Sampler, top_p_filter

TOP_PS = (0.9, 0.7, 0.5, 1e-3, 1e-12, 1e-13, 5e-324)


def logits_with_ties(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(4).round().div(2)


def kept(values: Tensor) -> list[list[int]]:
    """The indices of the values that were not cut, row by row."""
    return [row.nonzero().flatten().tolist() for row in (values > -torch.inf).flatten(0, -2)]


def borderline_logits(top_p: float, codes: int) -> Tensor:
    """One code as probable as top-p, which may or may not be enough, and others that share the rest."""
    return torch.tensor([[[top_p] + [(1 - top_p) / (codes - 1)] * (codes - 1)]]).log()


@pytest.mark.parametrize("codes", [5, 20, 64])
@pytest.mark.parametrize("top_p", TOP_PS)
@pytest.mark.parametrize("top_k", [0, 3])
def test_slots_are_filtered_as_images_alone(top_p: float, top_k: int, codes: int) -> None:
    """Also where rounding top-p to float32 would cut others."""
    layout = Layout(2, 2, range(codes))
    for temperature in (1.0, 0.7):
        alone = Sampler(layout, [3], temperature=temperature, top_k=top_k, top_p=top_p)
        other = SamplingParams(temperature=1.3, top_p=0.6)
        slots = SlotSampler(layout, [other, SamplingParams(3, temperature, top_k, top_p)], torch.device("cpu"))
        rows = borderline_logits(top_p, codes) if top_p >= 1e-3 else logits_with_ties(1, 1, codes)
        for logits in (rows, rows * temperature, logits_with_ties(1, 7, codes)):
            expected = alone.filter_logits(logits)
            assert torch.equal(slots.filter_logits(logits.expand(2, -1, -1))[1:], expected)
            assert torch.isfinite(expected).any(-1).all(), "the most probable code always stays"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_top_p_of_any_dtype(dtype: torch.dtype) -> None:
    """The most probable values stay, ties with the last one included, and -inf never does."""
    values = logits_with_ties(2, 30, 40).to(dtype)
    values[:, :10, 30:] = -torch.inf
    for top_p in TOP_PS:
        filtered = top_p_filter(values, top_p)
        assert filtered.dtype == dtype
        assert torch.equal(filtered, top_p_filter(values, torch.full((2, 1, 1), top_p, dtype=torch.float64)))
        for row, indices, probs in zip(
            values.flatten(0, 1), kept(filtered), values.double().softmax(-1).flatten(0, 1), strict=True
        ):
            least = row[indices].amin()
            assert indices == (row >= least).nonzero().flatten().tolist() and least > -torch.inf
            assert probs[row > least].sum() < top_p + 0.01 and probs[indices].sum() > top_p - 0.01


def test_top_p_of_special_values() -> None:
    """NaN is left for those who look for it; no row has an effect on others."""
    ordinary = logits_with_ties(1, 5, 40)
    rows = ordinary.clone()
    rows[0, 0, 3], rows[0, 1], rows[0, 2, 5], rows[0, 3, 1:] = torch.nan, -torch.inf, torch.inf, -torch.inf
    filtered = top_p_filter(rows, 0.8)
    assert filtered[0, 0].isnan().tolist() == rows[0, 0].isnan().tolist()
    assert kept(filtered)[1] == [] and filtered[0, 2, 5] == torch.inf and kept(filtered)[3] == [0]
    assert torch.equal(filtered[:, 4:], top_p_filter(ordinary, 0.8)[:, 4:])


@pytest.mark.parametrize("is_tensor", [False, True])
@torch.inference_mode()
def test_top_p_is_captured_and_compiled(is_tensor: bool) -> None:
    """What records a pass sees the whole filter, whatever sorts on this device."""
    values, top_p = logits_with_ties(2, 5, 64), torch.tensor([0.5, 0.9], dtype=torch.float64)[:, None, None]

    def run(logits: Tensor, limit: Tensor) -> Tensor:
        return top_p_filter(logits, limit if is_tensor else 0.8)

    buffer, limit = values.clone(), top_p.clone()
    tape = Tape(lambda: run(buffer, limit))
    for shift in range(1, 4):
        values, top_p = values.roll(shift, 0).add(logits_with_ties(2, 5, 64).roll(shift, 2)), top_p.roll(1, 0)
        buffer.copy_(values)
        limit.copy_(top_p)
        tape.replay()
        assert torch.equal(tape.out, run(values, top_p))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(values, top_p), run(values, top_p))
    torch._dynamo.reset()
