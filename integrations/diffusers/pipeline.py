"""GLM-Image in diffusers, with underdraw's decoding of its autoregressive part.

`DiffusionPipeline.from_pretrained("zai-org/GLM-Image", custom_pipeline="integrations/diffusers",
trust_remote_code=True)`, then as always.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from diffusers import GlmImagePipeline

from underdraw.integrations.transformers import custom_generate


class UnderdrawGlmImagePipeline(GlmImagePipeline):
    """`GlmImagePipeline` whose prior tokens are drawn several per pass; its call and components are unchanged.

    `drafter` and `tree` are names as in underdraw and may be set at any time. Calls with condition images use
    transformers' own loop.
    """

    drafter: str = "auto"
    tree: str = "auto"

    def generate_prior_tokens(self, prompt: Any, height: int, width: int, image: Any = None, **options: Any) -> Any:
        """The codes of the large grid, as diffusers hands them to the diffusion transformer."""
        if image is not None:
            return super().generate_prior_tokens(prompt, height, width, image, **options)
        with self._speculative_decoding():
            return super().generate_prior_tokens(prompt, height, width, **options)

    @contextmanager
    def _speculative_decoding(self) -> Iterator[None]:
        """Within it, the autoregressive model's `generate` is underdraw's."""
        model = self.vision_language_encoder
        options = {"custom_generate": custom_generate, "drafter": self.drafter, "tree": self.tree}
        model.generate = partial(model.generate, **options)
        try:
            yield
        finally:
            del model.generate  # the class's method again
