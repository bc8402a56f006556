"""How good a drafter is: how often the target's token is among its best few, level by level; and its model card."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from underdraw.calibration import Calibration

TOP_K = (1, 2, 4, 8)
AcceptanceTable = tuple[tuple[float, ...], ...]
"""By level, the probability that the target's token is among the drafter's best 1, 2, 4, 8."""


@dataclass(frozen=True, slots=True)
class DrafterQuality:
    """Loss and acceptance of a drafter on held-out samples, under shared Gumbel noise."""

    loss: float
    sampled: AcceptanceTable  # temperature 1
    greedy: AcceptanceTable  # temperature 0
    calibration: Calibration

    def __str__(self) -> str:
        def row(table: AcceptanceTable) -> str:
            levels = sorted({0, len(table) // 2, len(table) - 1})
            return ", ".join(f"level {n + 1}: " + "/".join(f"{share:.3f}" for share in table[n]) for n in levels)

        return f"loss {self.loss:.4f}; T=1 among 1/2/4/8 {row(self.sampled)}; T=0 {row(self.greedy)}"


class QualityMeter:
    """Collects guided logits of draft and target, and sums them up."""

    def __init__(self, device: torch.device) -> None:
        self._noise = torch.Generator(device).manual_seed(2)
        self._losses: list[Tensor] = []
        self._ranks: dict[int, list[Tensor]] = {0: [], 1: []}  # by temperature
        self._scores: list[tuple[Tensor, Tensor]] = []

    def add(self, draft: Tensor, target: Tensor, valid: Tensor) -> None:
        """Logits (B, M, D, K) of both, and which of them count (B, M, D)."""
        most = TOP_K[-1]
        self._losses.append(-(target.softmax(-1) * draft.log_softmax(-1)).sum(-1)[valid].mean())
        for temperature, ranks in self._ranks.items():
            noise = torch.empty_like(draft).exponential_(generator=self._noise).log().neg() if temperature else 0.0
            best = (draft + noise).topk(most, dim=-1)
            is_target = best.indices == (target + noise).argmax(-1, keepdim=True)
            rank = torch.where(is_target.any(-1), is_target.int().argmax(-1), most)
            ranks.append(torch.where(valid, rank, -1).flatten(0, 1).cpu())
            if temperature:
                self._scores.append((best.values[valid].float().cpu(), rank[valid].cpu()))

    def result(self) -> DrafterQuality:
        scores, ranks = (torch.cat(parts)[:20000] for parts in zip(*self._scores, strict=True))
        return DrafterQuality(
            loss=float(torch.stack(self._losses).mean()),
            sampled=acceptance_table(torch.cat(self._ranks[1])),
            greedy=acceptance_table(torch.cat(self._ranks[0])),
            calibration=Calibration.fit(scores, ranks),
        )


def acceptance_table(ranks: Tensor) -> AcceptanceTable:
    """Ranks (M, D), -1 where none was measured -> by level, the share among the best 1, 2, 4, 8."""
    rows = []
    for level in ranks.T:
        measured = level[level >= 0]
        rows.append(tuple(round((measured < count).float().mean().item(), 4) for count in TOP_K))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class DrafterCard:
    """What the README of a trained drafter says."""

    model: str
    kind: str
    parameters: int
    training: str  # how long, on what
    command: str
    evaluation: str  # on which samples
    quality: DrafterQuality
    tokens_per_pass: str

    def markdown(self) -> str:
        quality = self.quality
        rows = [
            f"| {level} | " + " | ".join(f"{share:.3f}" for share in sampled) + f" | {greedy[0]:.3f} |"
            for level, (sampled, greedy) in enumerate(zip(quality.sampled, quality.greedy, strict=True), start=1)
        ]
        lines = [
            f"# Drafter for {self.model}",
            "",
            f"{'An EAGLE' if self.kind == 'eagle' else 'A block'} drafter of {self.parameters / 1e6:.1f} M parameters "
            f"(embedding and head are the target's), trained for {self.training}:",
            "",
            "```bash",
            self.command,
            "```",
            "",
            f"Measured on {self.evaluation}: loss {quality.loss:.4f} nats. Probability that the target's token is "
            "among the best few drafted tokens, under shared noise, if all tokens before it were accepted:",
            "",
            "| level | " + " | ".join(f"T=1, best {count}" for count in TOP_K) + " | T=0, best 1 |",
            "|" + "---|" * (len(TOP_K) + 2),
            *rows,
            "",
            f"Tokens per target pass on the same texts: {self.tokens_per_pass}.",
            "",
        ]
        return "\n".join(lines)
