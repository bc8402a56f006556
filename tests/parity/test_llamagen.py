"""LlamaGen against its formulas, in the authors' format and in LANTERN's conversion; its captions and classes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import checkpoint_writers
import parity_cases
import pytest
import reference_networks as reference
import torch
from fake_hub import FakeHub
from parity_cases import ParityCase
from torch import Tensor

from underdraw.errors import CheckpointError, ConfigError, UnsupportedError
from underdraw.models.imagenet_classes import class_names
from underdraw.models.t5_text import clean_caption, strip_markup
from underdraw.nn import linear, onednn
from underdraw.nn.cached_decoder import CachedDecoder
from underdraw.pipeline import Pipeline

HEADS, SIDE = checkpoint_writers.LLAMAGEN["heads"], 4


def random_codes(count: int) -> Tensor:
    return torch.randint(0, checkpoint_writers.LLAMAGEN["vocab"], (count,), generator=torch.Generator().manual_seed(1))


def pad_features(features: Tensor) -> tuple[Tensor, Tensor]:
    """The authors' input: features padded to 120 rows with zeros on the left, and the mask."""
    count = features.shape[0]
    return torch.cat([torch.zeros(120 - count, features.shape[1]), features]), torch.arange(120) >= 120 - count


def guided_logits(state: dict[str, Tensor], features: Tensor, codes: Tensor, scale: float) -> Tensor:
    rows, mask = pad_features(features)
    prefix = [reference.llamagen_prefix(state, part) for part in (rows, state["cls_embedding.uncond_embedding"])]
    cond, uncond = (reference.llamagen_logits(state, part, mask, codes, SIDE, HEADS) for part in prefix)
    return uncond + scale * (cond - uncond)


def test_text_encoder_is_fetched_with_the_model(
    fake_hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not with the first prompt: it is the largest part, and may be refused or not fit the disk."""
    checkpoint_writers.write_llamagen_converted(tmp_path / "published" / "LlamaGen-T2I")
    fake_hub.add("google/flan-t5-xl", tmp_path / "published" / "t5" / "flan-t5-xl", {"tf_model.h5": 11_400_000_000})
    fake_hub.files["peizesun/llamagen_t2i"] = {"vq_ds16_t2i.pt": tmp_path / "published" / "vq_ds16_t2i.pt"}
    folder = shutil.copytree(tmp_path / "published" / "LlamaGen-T2I", tmp_path / "mine" / "LlamaGen-T2I")
    parity_cases.load(folder)
    assert "model.safetensors" in fake_hub.downloaded("google/flan-t5-xl")
    assert any("MB of google/flan-t5-xl (model.safetensors)" in message for message in caplog.messages)


def test_missing_package_for_text_is_an_error_before_the_encoder_is_fetched(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = checkpoint_writers.write_llamagen(tmp_path, "t2i")
    shutil.rmtree(tmp_path / "t5")
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(UnsupportedError, match=r"text for LlamaGen needs the package ftfy.*underdraw\[families\]"):
        parity_cases.load(path)


def test_t5_features_match_the_padded_encoder(t2i: ParityCase) -> None:
    """The authors run T5 on 120 padded and masked tokens; we run it on the true tokens only."""
    from transformers import AutoTokenizer, T5EncoderModel

    folder = t2i.path.parent / "t5" / "flan-t5-xl"
    model, tokenizer = T5EncoderModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer("a red fox", max_length=120, padding="max_length", truncation=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**batch).last_hidden_state[0][batch["attention_mask"][0].bool()]
    prompt = t2i.model.make_prompt("a red fox", None, t2i.model.sizes[0])
    assert isinstance(prompt.condition, Tensor) and prompt.condition.shape == (4, 24)  # three words and </s>
    torch.testing.assert_close(prompt.condition, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("text", ["a red fox", "fox", "a red fox on the blue ice " * 30])
@pytest.mark.parametrize("scale", [1.0, 7.5])
def test_text_logits_match_the_formulas(t2i: ParityCase, text: str, scale: float) -> None:
    """Short prompts, whose padding is left out, and one that is longer than all 120 positions."""
    prompt, codes = t2i.model.make_prompt(text, None, t2i.model.sizes[0]), random_codes(11)
    assert isinstance(prompt.condition, Tensor)
    ours = parity_cases.chain_logits(t2i.model, prompt, t2i.model.make_layout(t2i.model.sizes[0]), codes, scale)
    torch.testing.assert_close(ours, guided_logits(t2i.reference, prompt.condition, codes, scale), atol=2e-4, rtol=1e-5)


@torch.no_grad()
def test_moving_a_model_keeps_the_bits_of_captions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading packs the caption projection as `to` does, so that images do not depend on whether it was called."""
    monkeypatch.setattr(linear, "prefers_onednn", lambda dtype: True)
    monkeypatch.setattr(onednn, "_MIN_WEIGHTS", 0)
    path, _ = checkpoint_writers.write_llamagen(tmp_path, "t2i")
    model = parity_cases.load(path)
    assert model.target.projection is not None
    features = torch.randn(120, model.target.projection[0].in_features, generator=torch.Generator().manual_seed(0))
    expected, layouts = model.target.projection(features), [p.layout for p in model.target.projection.parameters()]
    Pipeline(model, drafter="jacobi", tree="none").to("cpu")
    assert [parameter.layout for parameter in model.target.projection.parameters()] == layouts
    assert torch.equal(model.target.projection(features), expected)


def test_converted_checkpoint_has_equal_logits(t2i: ParityCase, converted: ParityCase) -> None:
    size, codes = t2i.model.sizes[0], random_codes(9)
    assert converted.model.sizes == t2i.model.sizes
    ours, theirs = (
        parity_cases.chain_logits(
            case.model, case.model.make_prompt("blue ice", None, size), case.model.make_layout(size), codes, 7.5
        )
        for case in (converted, t2i)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_class_logits_match_the_formulas(c2i: ParityCase, scale: float) -> None:
    model, state, codes = c2i.model, c2i.reference, random_codes(13)
    prompt = model.make_prompt("golden retriever", None, model.sizes[0])
    ours = parity_cases.chain_logits(model, prompt, model.make_layout(model.sizes[0]), codes, scale)
    table, mask = state["cls_embedding.embedding_table.weight"], torch.ones(1)
    cond, uncond = (
        reference.llamagen_logits(state, table[row : row + 1], mask, codes, SIDE, HEADS) for row in (207, 1000)
    )
    torch.testing.assert_close(ours, uncond + scale * (cond - uncond), atol=1e-4, rtol=0)


@pytest.mark.parametrize("wrap", ["model", "module", "state_dict", None])
def test_state_dict_is_read_from_every_wrapper(tmp_path: Path, c2i: ParityCase, wrap: str | None) -> None:
    """DDP, DeepSpeed, Lightning, and bare as FSDP saves it; argparse namespaces next to the weights are allowed."""
    path, _ = checkpoint_writers.write_llamagen(tmp_path, "c2i", wrap)
    state, expected = parity_cases.load(path).target.net.state_dict(), c2i.model.target.net.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_class_by_index_and_by_name(c2i: ParityCase) -> None:
    model, size = c2i.model, c2i.model.sizes[0]
    first = checkpoint_writers.LLAMAGEN["vocab"]
    assert model.make_prompt("207", None, size).condition == (first + 207,)
    assert model.make_prompt(" Golden Retriever ", None, size).condition == (first + 207,)
    assert model.make_prompt("0", None, size).unconditional == (first + 1000,)
    assert model.make_prompt("0", "goldfish", size).unconditional == (first + 1,)
    assert len(class_names()) == 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1000", "there is no class 1000; this model has 0 to 999"),
        ("golden retreiver", "no ImageNet class is called 'golden retreiver'. Did you mean 'golden retriever'?"),
        ("crane", "'crane' is the name of classes 134, 517; give the number"),
    ],
)
def test_unknown_class_is_an_error(c2i: ParityCase, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        c2i.model.make_prompt(text, None, c2i.model.sizes[0])
    assert message in str(caught.value)
    with pytest.raises(ConfigError):
        c2i.model.check_prompt(text)


def test_image_size_from_file_name_or_rope_table(tmp_path: Path) -> None:
    """The file does not store its image size; its name does, or the RoPE table that some versions saved."""
    path, state = checkpoint_writers.write_llamagen(tmp_path, "c2i", name="c2i_B_384.pt")
    assert [str(size) for size in parity_cases.load(path).sizes] == ["384x384"]
    path = path.rename(tmp_path / "mine.pt")
    assert [str(size) for size in parity_cases.load(path).sizes] == ["256x256", "384x384", "512x512"]
    torch.save({"model": {**state, "freqs_cis": torch.zeros(1 + 256, 32, 2)}}, path)
    assert [str(size) for size in parity_cases.load(path).sizes] == ["256x256"]


def test_image_size_of_a_renamed_file_is_not_guessed(tmp_path: Path) -> None:
    path, _ = checkpoint_writers.write_llamagen(tmp_path, "c2i", name="mine.pt")
    model = parity_cases.load(path)
    with pytest.raises(ConfigError, match=r"which image size.*256x256, 384x384, 512x512"):
        model.resolve_size(None, None)
    assert str(model.resolve_size(384, 384)) == "384x384"
    (tmp_path / "underdraw.json").write_text('{"size": "384x384"}')
    assert str(parity_cases.load(path).resolve_size(None, None)) == "384x384"


def test_folder_with_several_models_is_an_error(tmp_path: Path) -> None:
    checkpoint_writers.write_llamagen(tmp_path, "c2i", name="c2i_B_256.pt")
    checkpoint_writers.write_llamagen(tmp_path, "c2i", name="c2i_L_256.pt")
    with pytest.raises(ConfigError, match=r"several models \(c2i_B_256.pt, c2i_L_256.pt\); give one"):
        parity_cases.load(tmp_path)


def test_padding_stays_zero_in_every_layer(t2i: ParityCase) -> None:
    """Padded rows are exactly zero after every layer, so leaving them out changes nothing."""
    net = t2i.model.target.net
    features = t2i.model.make_prompt("a red fox", None, t2i.model.sizes[0]).condition
    assert isinstance(features, Tensor) and t2i.model.target.projection is not None
    rows, mask = pad_features(features)
    prefix = reference.llamagen_prefix(t2i.reference, rows)
    table = reference.rotation_table(SIDE, 64, 120)
    hidden = reference.llamagen_hidden(t2i.reference, prefix, table, HEADS, reference.llamagen_visible(mask, 120))
    assert all(not layer[~mask].any() for layer in hidden)
    x = t2i.model.target.projection(rows)[None]
    cos_sin = net.arch.rope.cos_sin(net.arch.rope.prompt_rotation(116, x.device), x.dtype)[None]
    with torch.no_grad():
        padding = CachedDecoder(net, 1, 256).append(x[:, :116], cos_sin, torch.tensor([116]), [116])
    assert not padding.any()


def test_prefix_with_zero_keys_acts_as_one_key() -> None:
    """120 zero keys are one key with score log 120 and the mean of their values."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(shape, generator=generator) for shape in ((8,), (5, 8), (125, 8)))
    scores = torch.cat([torch.zeros(120), keys @ query])
    whole = scores.softmax(0) @ values
    collapsed = torch.cat([torch.tensor([120.0]).log(), keys @ query]).softmax(0)
    as_one_key = collapsed @ torch.cat([values[:120].mean(0, keepdim=True), values[120:]])
    torch.testing.assert_close(whole, as_one_key)


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("A Red Fox", "a red fox"),
        ("a fox, see https://example.com/fox/ now", "a fox, see now"),
        ("a <b>bold</b> fox &amp; hare", "a bold fox hare"),
        ("fox — the movie", "fox - the movie"),
        ("fox #123 by @someone", "fox by"),
        ("a-b-c-d-e", "a b c d e"),
        ("photo 1024x768 of a fox", "photo of a fox"),
        ("IMG_2034.jpg of a fox", "of a fox"),
        ("'quoted fox'", "quoted fox"),
        ("a fox.a hare", "a fox. a hare"),
        ("free shipping, click for details: fox", "fox"),
    ],
)
def test_captions_are_cleaned(caption: str, expected: str) -> None:
    assert clean_caption(caption).strip(" ,:") == expected


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a fox -: free download", "a fox -"),  # the edges are cleaned before trailing blanks are stripped
        ("a red fox <style>b {color: red}</style> in snow", "a red fox in snow"),
        ("a <script>x()</script>fox", "a fox"),
        ("a fox &copy; 2020", "a fox 2020"),
        ("a fox &foo; hare", "a fox foo hare"),
        ("<ruby>fox<rt>kitsune</rt></ruby>", "fox"),
        ("foo.http://com fox", "fox"),  # addresses are removed twice
        ("a &#65;bc1234 fox", "a fox"),
        ("a < b & c", "a < b c"),
    ],
)
def test_captions_are_cleaned_as_by_the_authors(caption: str, expected: str) -> None:
    """Expected values are outputs of the authors' code (language/t5.py of LlamaGen) with ftfy and BeautifulSoup."""
    assert clean_caption(caption) == expected


@pytest.mark.parametrize(
    "caption", ["a <![CDATA[red]]> fox", "a fox &copy", "a <b fox", "<template>x <b>y</b></template>z", "a &#150; b"]
)
def test_markup_is_stripped_as_by_beautifulsoup(caption: str) -> None:
    """Python's versions differ in what becomes of these, and the authors' code differs with them."""
    from bs4 import BeautifulSoup

    assert strip_markup(caption) == BeautifulSoup(caption, features="html.parser").text


def test_markup_that_cannot_be_parsed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import bs4

    def reject(*_: Any, **__: Any) -> None:
        raise bs4.exceptions.ParserRejectedMarkup("expected name token")

    monkeypatch.setattr(bs4, "BeautifulSoup", reject)
    with pytest.raises(ConfigError, match="cannot be parsed; write the prompt without <"):
        clean_caption("a fox <![ b")


def test_plain_captions_need_no_html_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bs4", None)
    assert clean_caption("a red fox") == "a red fox"
    with pytest.raises(UnsupportedError, match=r"a prompt with < or & needs the package bs4.*underdraw\[families\]"):
        clean_caption("a <b>red</b> fox")


def test_missing_caption_weights_are_named(tmp_path: Path) -> None:
    path, state = checkpoint_writers.write_llamagen(tmp_path, "t2i")
    torch.save({"model": {n: v for n, v in state.items() if "uncond" not in n}}, path)
    with pytest.raises(CheckpointError, match=r"cls_embedding\.uncond_embedding; it is incomplete"):
        parity_cases.load(path)
