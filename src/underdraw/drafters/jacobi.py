"""Speculative Jacobi decoding with shared noise: no training, no weights, any model.

The target's choices at the nodes behind the accepted path were made in a context that was partly wrong, but with the
right noise: they are good guesses for the same steps in the next pass. New steps start from an initial guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.layout import Layout
from underdraw.plan import MAX_NODES
from underdraw.protocols import Opening, Outcome, Prompt, Request
from underdraw.tree import DraftTree, chain

Init = Literal["left", "above", "random"]


@dataclass(frozen=True, slots=True)
class Jacobi:
    """At most `window` tokens are guessed ahead, fewer where the tree is less deep; `init` says from where a step
    starts: the token to its left, the one above (left in the first row), or a random code."""

    window: int = 16
    init: Init = "above"

    def __post_init__(self) -> None:
        if not 1 <= self.window < MAX_NODES:
            raise ConfigError(f"a jacobi window of {self.window} tokens is impossible; use 1 to {MAX_NODES - 1}.")

    def open(self, prompts: Sequence[Prompt], layout: Layout, first: Opening, *, guidance: float) -> JacobiSession:
        return JacobiSession(self, layout, len(prompts), first.logits.device)


class JacobiSession:
    """Guesses for every step to come; a guess lasts until its step is committed."""

    def __init__(self, drafter: Jacobi, layout: Layout, batch: int, device: torch.device) -> None:
        self.drafter, self.layout = drafter, layout
        self.guess = torch.full((batch, layout.steps + MAX_NODES), -1, dtype=torch.int64, device=device)
        self.steps = torch.zeros(batch, dtype=torch.int64, device=device)  # (B,) of the last root

    def draft(self, request: Request) -> DraftTree:
        self.steps = request.steps
        self.guess.scatter_(1, request.steps[:, None], request.root[:, None])
        depth = min(request.plan.depth, self.drafter.window)
        tokens = [request.root]
        for ahead in range(1, depth + 1):
            steps = request.steps + ahead
            kept = self.guess.gather(1, steps[:, None])[:, 0]
            tokens.append(torch.where(kept >= 0, kept, self._initial(request, steps, tokens[-1])))
        room = request.limits.depth if request.limits is not None else None
        return chain(torch.stack(tokens, dim=1), room)

    def _initial(self, request: Request, steps: Tensor, left: Tensor) -> Tensor:
        layout, init = self.layout, self.drafter.init
        if init == "random":
            token = request.draws.sampler.random_tokens(steps)
        else:
            token = torch.where(layout.forced(steps - 1), request.root, left)  # no row end stands in for a code
            if init == "above":
                place, inside = layout.neighbour(steps, -1, 0)
                above = self.guess.gather(1, place.clamp(min=0)[:, None])[:, 0]
                token = torch.where(inside & (above >= 0), above, token)
        if layout.row_end is None:
            return token
        return torch.where(layout.forced(steps), layout.row_end, token)

    def commit(self, outcome: Outcome) -> None:
        """Keep what the target chose at each node of the chain as the guess for the step after it."""
        depths = outcome.tree.depths  # (B, N)
        choices = self.layout.tokens(outcome.draws.choose(outcome.output.logits, depths + 1))
        steps = self.steps[:, None] + 1 + torch.arange(depths.shape[1], device=depths.device)
        self.guess.scatter_(1, steps, torch.where(depths >= 0, choices, self.guess.gather(1, steps)))
