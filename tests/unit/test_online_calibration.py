"""Acceptance probabilities of candidates, fitted while decoding."""

from __future__ import annotations

import torch

from underdraw.drafters.online_calibration import OnlineCalibration


def test_probabilities_of_candidates_and_of_none_sum_to_one_and_fall_with_rank() -> None:
    calibration = OnlineCalibration(8, torch.device("cpu"))
    rows = [[0.0] * 8, [0.0, 0.1, 0.5, 1, 2, 3, 4, 5], [0.0] + [torch.inf] * 7, [0.0, 9] + [torch.inf] * 6]
    gaps = torch.tensor([[[*row, 0.0] for row in rows]])  # of the root and of depths 1 to 3
    buckets = calibration.buckets(torch.tensor([[3, 3, 0, 9]]))
    assert buckets.tolist() == [[3, 3, 0, 5]]
    probs = calibration.log_probs(calibration.prior(gaps, buckets), buckets).exp()
    assert torch.allclose(probs.sum(-1), torch.ones(1, 4))
    assert probs[0, 0].tolist() == [1.0] + [0.0] * 8, "the root is certain"
    assert (probs[..., :7] >= probs[..., 1:8]).all()
    assert (probs[0, 2, 1:8] == 0).all() and probs[0, 2, 0] > 0.8
    is_forced = torch.tensor([[False, False, True, False]])
    forced = calibration.log_probs(calibration.prior(gaps, buckets, is_forced), buckets)
    assert forced[0, 2, 0] == 0.0, "a row end is certain"


def test_candidates_are_more_probable_the_longer_they_and_the_step_before_have_stayed() -> None:
    calibration = OnlineCalibration(4, torch.device("cpu"))
    gaps = torch.tensor([0.0, 0.4, 1.0, 2.0, 0.0]).expand(6, 3, 5)
    stays = torch.tensor([[1, 2, passes] for passes in range(1, 7)])
    first = calibration.log_probs(calibration.prior(gaps, stays.clamp(max=5)), stays.clamp(max=5))[..., 0]
    assert (first[:-2, 2] < first[1:-1, 2]).all() and first[-2, 2] == first[-1, 2], "up to 5 passes"
    changed = calibration.prior(gaps, torch.tensor([[1, 1, 2]] * 6)).log_softmax(-1)[..., 0]
    stayed = calibration.prior(gaps, torch.tensor([[1, 2, 2]] * 6)).log_softmax(-1)[..., 0]
    assert (changed[:, 2] < stayed[:, 2]).all()


def test_observed_choices_are_counted_by_bucket_and_rank() -> None:
    calibration = OnlineCalibration(3, torch.device("cpu"))
    rows = [[0.0, 0.0, 0.0], [0.0, 0.1, 1.0], [0.0, 1.0, 1.5], [0.0, 0.2, 0.3], [0.0, 0.2, 0.3]]
    gaps, buckets = torch.tensor([[[*row, 0.0] for row in rows]]), torch.tensor([[1, 1, 2, 1, 1]])
    prior, buckets = calibration.prior(gaps, buckets)[:, 1:], buckets[:, 1:]
    is_chosen = torch.tensor([[[1, 0, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0]]]).bool()
    calibration.observe(prior, buckets, is_chosen, torch.tensor([[True, True, True, False]]))
    observed, expected = calibration.counts.unbind(1)
    assert observed[1].tolist() == [1, 0, 0, 1], "rank 0 once, none of the candidates once; the fourth does not count"
    assert observed[2].tolist() == [0, 0, 1, 0]
    assert observed.sum() == 3
    assert torch.allclose(expected[1], prior[0, [0, 2]].softmax(-1).sum(0))
    assert torch.allclose(expected.sum(1), observed.sum(1))
    calibration.restart()
    assert (calibration.counts == 0).all()


def test_probabilities_converge_to_what_is_observed() -> None:
    """A target that always chooses the second candidate, unlike the prior."""
    calibration = OnlineCalibration(4, torch.device("cpu"))
    gaps, buckets = torch.tensor([[[0.0, 0.4, 1.0, 2.0, 0.0]] * 6]), torch.full((1, 6), 2)
    is_chosen = torch.tensor([False, True, False, False]).expand(1, 5, 4)
    prior = calibration.prior(gaps, buckets)
    before = calibration.log_probs(prior, buckets)[:, 1:].exp()
    for _ in range(60):
        calibration.observe(prior[:, 1:], buckets[:, 1:], is_chosen, torch.ones(1, 5, dtype=torch.bool))
    after = calibration.log_probs(prior, buckets)[:, 1:].exp()
    assert (before[..., 1] < 0.4).all() and (after[..., 1] > 0.8).all()
