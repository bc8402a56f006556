"""Text for LlamaGen: captions cleaned as its authors clean them, then features of a T5 encoder.

The encoder is loaded when the first prompt comes. The cleaning is that of DeepFloyd's IF, which these models were
trained with; its order of steps matters and it is applied twice.
"""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote_plus

import torch
from torch import Tensor

from underdraw.errors import CheckpointError
from underdraw.extras import require_package
from underdraw.models.checkpoint import Checkpoint, first_line
from underdraw.models.family import Placement

PUBLISHED = "google/flan-t5-xl"
_FOLDERS = ("flan-t5-xl", "t5/flan-t5-xl", "t5-ckpt/flan-t5-xl", "pretrained_models/t5-ckpt/flan-t5-xl")
_DOMAINS = "com|co|ru|net|org|edu|gov|it"
_IMAGES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DASHES = (
    "-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
    "\ufe31\ufe32\ufe58\ufe63\uff0d"
)
_SIGNS = re.escape("#\u00ae\u2022\u00a9\u2122&@\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~)(][}{|\\/*")

Steps = tuple[tuple[str, str], ...]
_LINKS: Steps = (
    (rf"\b(?:(?:https?|www):(?:/{{1,3}}|[a-z0-9%])|[a-z0-9.-]+\.(?:{_DOMAINS})[\w/-]*\b/?(?!@))", ""),
)  # text is in lower case when these are applied
_MARKS: Steps = (
    (r"@\w+\b", ""),
    ("[\u31c0-\u9fff]+", ""),
    (f"[{_DASHES}]+", "-"),
    ("[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    ("[\u2018\u2019]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.(?:{_IMAGES})", ""),
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (rf"[{_SIGNS}]+", " "),
    (r"\s+\.\s+", " "),
)
_CODES: Steps = (
    (r"\b[a-z]{1,3}\d{3,15}\b", ""),
    (r"\b[a-z]+\d+[a-z]+\b", ""),
    (r"\b\d+[a-z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_IMAGES})(\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-z]+\d+[a-z]+\d+[a-z\d]*\b", " "),
    ("\\b\\d+\\.?\\d*[x\u0445\u00d7]\\d+\\.?\\d*\\b", ""),
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
)
_EDGES: Steps = (
    (r"(?s)^[\"'](.+)[\"']$", r"\1"),
    (r"^['_,:;-]", ""),
    (r"['_,:+-]$", ""),
    (r"^\.\S+$", ""),
)


class _Text(HTMLParser):
    """Collects what stands between tags."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def _plain(text: str) -> str:
    parser = _Text()
    parser.feed(text)
    parser.close()
    return "".join(parser.parts)


def _apply(steps: Steps, text: str) -> str:
    for pattern, new in steps:
        text = re.sub(pattern, new, text)
    return text


def clean(text: str) -> str:
    """A caption as the model has learned them."""
    ftfy = require_package("ftfy", "families", "cleaning prompts for LlamaGen")
    for _ in range(2):
        text = unquote_plus(str(text)).strip().lower().replace("<person>", "person")
        text = _apply(_MARKS, _plain(_apply(_LINKS, text)))
        if len(re.findall(r"[-_]", text)) > 3:
            text = re.sub(r"[-_]", " ", text)
        text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
        text = _apply(_EDGES, _apply(_CODES, text).strip()).strip()
    return text


class TextFeatures:
    """Features of a text: (n, D) with n <= `length` tokens, on the model's device and in its type."""

    def __init__(self, checkpoint: Checkpoint, placement: Placement, length: int) -> None:
        self.checkpoint, self.placement, self.length = checkpoint, placement, length
        self._parts: tuple[Any, Any] | None = None

    @torch.no_grad()
    def __call__(self, text: str) -> Tensor:
        tokenizer, model = self._loaded()
        tokens = tokenizer(clean(text), max_length=self.length, truncation=True, return_tensors="pt")
        ids, mask = (tokens[key].to(self.placement.device) for key in ("input_ids", "attention_mask"))
        features: Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state[0]
        return features

    def _loaded(self) -> tuple[Any, Any]:
        """Tokenizer and encoder, loaded once."""
        if self._parts is None:
            transformers = require_package("transformers", "families", "text for LlamaGen")
            path = self.checkpoint.fetched(_FOLDERS, PUBLISHED)
            try:
                model = transformers.T5EncoderModel.from_pretrained(path, dtype=self.placement.dtype)
                tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path} holds no T5 encoder ({first_line(error)}).") from error
            self._parts = tokenizer, model.to(self.placement.device).eval()
        return self._parts
