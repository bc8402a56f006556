"""A drafter session that has the methods can be captured as a CUDA graph, with or without the base class."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import toy_models

from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.jacobi_tree import JacobiTree
from underdraw.drafters.neighbour import Neighbour
from underdraw.drafters.small_model import SmallModel
from underdraw.protocols import (
    Capturable,
    CapturableDraft,
    DraftRequest,
    PassConfig,
    PrefillOutput,
    Prompt,
    VerifiedStep,
)
from underdraw.tree import DraftTree, root_only

TARGET = toy_models.target()
DRAFTERS: dict[str, tuple[Any, str]] = {
    "eagle": (toy_models.eagle(TARGET), "tree"),
    "block": (toy_models.block(TARGET), "tree"),
    "small_model": (SmallModel(TARGET), "tree"),
    "neighbour": (Neighbour(), "tree"),
    "jacobi": (Jacobi(), "chain"),
    "jacobi_tree": (JacobiTree(), "trunk"),
    "forced": (Forced(), "chain"),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_built_in_drafters_can_be_captured_and_say_what_they_propose(name: str) -> None:
    drafter, proposes = DRAFTERS[name]
    session = TARGET.open(toy_models.prompts(1), toy_models.PLAIN, guidance=2.0)
    draft_session = drafter.open(toy_models.prompts(1), toy_models.PLAIN, session.prefill, guidance=2.0)
    assert isinstance(session, Capturable)
    assert isinstance(draft_session, CapturableDraft)
    assert drafter.proposes == proposes


class EagerSession:
    """Only what `DrafterSession` requires."""

    def draft(self, request: DraftRequest) -> DraftTree:
        return root_only(request.root)

    def commit(self, verified: VerifiedStep) -> None:
        pass


class StructuralSession(EagerSession):
    """All methods of `CapturableDraft`, without its base class."""

    def prepare(self, config: PassConfig) -> Hashable | None:
        return ()

    def sync(self, counts: tuple[int, ...]) -> None:
        pass

    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        return True


def test_capture_needs_the_methods_and_no_base_class() -> None:
    assert isinstance(StructuralSession(), CapturableDraft)
    assert not isinstance(EagerSession(), CapturableDraft)
