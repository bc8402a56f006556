"""Text features for LlamaGen: captions cleaned as in its training, then encoded by a T5 encoder.

The cleaning is that of DeepFloyd IF, which LlamaGen's authors reuse: an ordered list of substitutions, applied twice.
The order matters, and so do its quirks (for example, that a caption is stripped only after its edges were cleaned).
"""

from __future__ import annotations

import html
import re
import warnings
from typing import Any
from urllib.parse import unquote_plus

import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.extras import require_package
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import Placement
from underdraw.models.pretrained import load_module, reading_folder

T5_HUB_ID = "google/flan-t5-xl"
_T5_FOLDERS = ("flan-t5-xl", "t5/flan-t5-xl", "t5-ckpt/flan-t5-xl", "pretrained_models/t5-ckpt/flan-t5-xl")
_DOMAIN = r"[a-zA-Z0-9.-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_FILE_TYPES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DASHES = (
    "-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
    "\ufe31\ufe32\ufe58\ufe63\uff0d"
)
_PUNCTUATION = re.escape("#\u00ae\u2022\u00a9\u2122&@\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~)(][}{|\\/*")

Substitutions = tuple[tuple[str, str], ...]  # (pattern, replacement), in order
_URLS: Substitutions = (
    (rf"\b(?:https?:(?:/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN})", ""),
)
_SYMBOLS: Substitutions = (
    (r"@\w+\b", ""),  # user names
    ("[\u31c0-\u9fff]+", ""),  # CJK
    (f"[{_DASHES}]+", "-"),
    ("[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    ("[\u2018\u2019]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.(?:{_FILE_TYPES})", ""),
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (rf"[{_PUNCTUATION}]+", " "),
    (r"\s+\.\s+", " "),
)
_SHOP_TEXT: Substitutions = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # article numbers
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILE_TYPES})(\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    ("\\b\\d+\\.?\\d*[x\u0445\u00d7]\\d+\\.?\\d*\\b", ""),  # sizes such as 1024x768
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
)
_EDGES: Substitutions = (
    (r"(?s)^[\"'](.+)[\"']$", r"\1"),
    (r"^['_,:;-]", ""),
    (r"['_,:+-]$", ""),
    (r"^\.\S+$", ""),
)


def clean_caption(text: str) -> str:
    """Clean a caption as LlamaGen's training did."""
    ftfy = require_package("ftfy", "families", "cleaning prompts for LlamaGen")
    for _ in range(2):
        text = unquote_plus(str(text)).strip().lower().replace("<person>", "person")
        text = _apply(_SYMBOLS, strip_markup(_apply(_URLS, text)))
        if len(re.findall(r"[-_]", text)) > 3:  # this-is-my-cute-cat
            text = re.sub(r"[-_]", " ", text)
        text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
        text = _apply(_EDGES, _apply(_SHOP_TEXT, text)).strip()
    return text


def _apply(substitutions: Substitutions, text: str) -> str:
    for pattern, replacement in substitutions:
        text = re.sub(pattern, replacement, text)
    return text


def strip_markup(text: str) -> str:
    """The text of an HTML fragment; what tags, style sheets, CDATA and entities become is BeautifulSoup's choice."""
    if "<" not in text and "&" not in text:
        return text
    bs4 = require_package("bs4", "families", "a prompt with < or &")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about text that looks like a file name or an address
            return str(bs4.BeautifulSoup(text, features="html.parser").text)
    except bs4.exceptions.ParserRejectedMarkup:
        raise ConfigError(f"the markup in the prompt {text!r} cannot be parsed; write the prompt without <.") from None


class T5Features:
    """Encodes a text to T5 features (n, D), n <= `max_length`, on the model's device and in its dtype.

    Its files are downloaded at once, with those of the model. Being several GB, it is loaded with the first prompt.
    """

    def __init__(self, checkpoint: Checkpoint, placement: Placement, max_length: int) -> None:
        self.placement, self.max_length = placement, max_length
        for package in ("transformers", "ftfy"):
            require_package(package, "families", "text for LlamaGen")
        self.folder = checkpoint.find_or_download(_T5_FOLDERS, T5_HUB_ID)
        self._loaded: tuple[Any, Any] | None = None  # tokenizer and encoder

    @torch.no_grad()
    def __call__(self, text: str) -> Tensor:
        tokenizer, encoder = self._load()
        tokens = tokenizer(clean_caption(text), max_length=self.max_length, truncation=True, return_tensors="pt")
        ids, mask = (tokens[key].to(self.placement.device) for key in ("input_ids", "attention_mask"))
        features: Tensor = encoder(input_ids=ids, attention_mask=mask).last_hidden_state[0]
        return features

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            transformers = require_package("transformers", "families", "text for LlamaGen")
            encoder = load_module(transformers.T5EncoderModel, self.folder, "a T5 encoder", dtype=self.placement.dtype)
            with reading_folder(self.folder, "a T5 encoder"):
                tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
            self._loaded = tokenizer, encoder.to(self.placement.device).eval()
        return self._loaded
