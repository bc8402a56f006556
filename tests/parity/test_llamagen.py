"""LlamaGen against its formulas, in the authors' format and in LANTERN's conversion."""

from __future__ import annotations

from pathlib import Path

import along
import published
import pytest
import reference
import torch
from along import Case
from torch import Tensor

from underdraw.errors import CheckpointError, ConfigError
from underdraw.models.imagenet_classes import labels
from underdraw.models.t5_text import clean
from underdraw.nn.kv_cache import KVCache

HEADS, SIDE = published.LLAMAGEN["heads"], 4


def drawn(count: int) -> Tensor:
    return torch.randint(0, published.LLAMAGEN["vocab"], (count,), generator=torch.Generator().manual_seed(1))


def padded(features: Tensor) -> tuple[Tensor, Tensor]:
    """What the authors' code feeds: 120 rows, zeros on the left, and a mask."""
    count = features.shape[0]
    return torch.cat([torch.zeros(120 - count, features.shape[1]), features]), torch.arange(120) >= 120 - count


def apply_guidance(state: dict[str, Tensor], features: Tensor, codes: Tensor, scale: float) -> Tensor:
    rows, mask = padded(features)
    prefix = [reference.llamagen_prefix(state, part) for part in (rows, state["cls_embedding.uncond_embedding"])]
    cond, uncond = (reference.llamagen_logits(state, part, mask, codes, SIDE, HEADS) for part in prefix)
    return uncond + scale * (cond - uncond)


def test_features_are_those_of_the_authors_encoder(t2i: Case) -> None:
    """120 tokens with padding and its mask, as the authors run T5; only the true ones are kept here."""
    from transformers import AutoTokenizer, T5EncoderModel

    folder = t2i.path.parent / "t5" / "flan-t5-xl"
    model, tokenizer = T5EncoderModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer("a red fox", max_length=120, padding="max_length", truncation=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**batch).last_hidden_state[0][batch["attention_mask"][0].bool()]
    prompt = t2i.model.make_prompt("a red fox", None, t2i.model.sizes[0])
    assert isinstance(prompt.condition, Tensor) and prompt.condition.shape == (4, 24)  # three words and </s>
    torch.testing.assert_close(prompt.condition, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("words", ["a red fox", "fox", "a red fox on the blue ice " * 30])
@pytest.mark.parametrize("scale", [1.0, 7.5])
def test_text_logits(t2i: Case, words: str, scale: float) -> None:
    """Short prompts with their padding left out, and one that fills and overflows all 120 places."""
    prompt, codes = t2i.model.make_prompt(words, None, t2i.model.sizes[0]), drawn(11)
    assert isinstance(prompt.condition, Tensor)
    ours = along.logits_along(t2i.model, prompt, t2i.model.make_layout(t2i.model.sizes[0]), codes, scale)
    torch.testing.assert_close(ours, apply_guidance(t2i.source, prompt.condition, codes, scale), atol=2e-4, rtol=1e-5)


def test_the_conversion_is_the_same_model(t2i: Case, converted: Case) -> None:
    size, codes = t2i.model.sizes[0], drawn(9)
    assert converted.model.sizes == t2i.model.sizes
    ours, theirs = (
        along.logits_along(
            case.model, case.model.make_prompt("blue ice", None, size), case.model.make_layout(size), codes, 7.5
        )
        for case in (converted, t2i)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_class_logits(c2i: Case, scale: float) -> None:
    model, state, codes = c2i.model, c2i.source, drawn(13)
    prompt = model.make_prompt("golden retriever", None, model.sizes[0])
    ours = along.logits_along(model, prompt, model.make_layout(model.sizes[0]), codes, scale)
    table, mask = state["cls_embedding.embedding_table.weight"], torch.ones(1)
    cond, uncond = (
        reference.llamagen_logits(state, table[row : row + 1], mask, codes, SIDE, HEADS) for row in (207, 1000)
    )
    torch.testing.assert_close(ours, uncond + scale * (cond - uncond), atol=1e-4, rtol=0)


@pytest.mark.parametrize("wrap", ["model", "module", "state_dict", None])
def test_every_wrapper_of_the_authors_files(tmp_path: Path, c2i: Case, wrap: str | None) -> None:
    """DDP, deepspeed, lightning, and bare as FSDP saves it; argparse namespaces beside the weights are let in."""
    path, _ = published.llamagen(tmp_path, "c2i", wrap)
    own, other = along.load(path).target.net.state_dict(), c2i.model.target.net.state_dict()
    assert all(torch.equal(own[name], other[name]) for name in other)


def test_classes_by_number_and_name(c2i: Case) -> None:
    model, size = c2i.model, c2i.model.sizes[0]
    first = published.LLAMAGEN["vocab"]
    assert model.make_prompt("207", None, size).condition == (first + 207,)
    assert model.make_prompt(" Golden Retriever ", None, size).condition == (first + 207,)
    assert model.make_prompt("0", None, size).unconditional == (first + 1000,)
    assert model.make_prompt("0", "goldfish", size).unconditional == (first + 1,)
    assert len(labels()) == 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1000", "there is no class 1000; this model knows 0 to 999"),
        ("golden retreiver", "no ImageNet class is called 'golden retreiver'. Did you mean 'golden retriever'?"),
        ("crane", "'crane' is the name of classes 134, 517; give the number"),
    ],
)
def test_unknown_classes(c2i: Case, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        c2i.model.make_prompt(text, None, c2i.model.sizes[0])
    assert message in str(caught.value)
    with pytest.raises(ConfigError):
        c2i.model.check_prompt(text)


def test_sizes_from_name_table_or_neither(tmp_path: Path) -> None:
    """The authors' file does not say how large its pictures are; its name does, or a table that some versions saved."""
    path, state = published.llamagen(tmp_path, "c2i", name="c2i_B_384.pt")
    assert [str(size) for size in along.load(path).sizes] == ["384x384"]
    path = path.rename(tmp_path / "mine.pt")
    assert [str(size) for size in along.load(path).sizes] == ["256x256", "384x384", "512x512"]
    torch.save({"model": {**state, "freqs_cis": torch.zeros(1 + 256, 32, 2)}}, path)
    assert [str(size) for size in along.load(path).sizes] == ["256x256"]


def test_a_folder_with_several_models(tmp_path: Path) -> None:
    published.llamagen(tmp_path, "c2i", name="c2i_B_256.pt")
    published.llamagen(tmp_path, "c2i", name="c2i_L_256.pt")
    with pytest.raises(ConfigError, match=r"several models \(c2i_B_256.pt, c2i_L_256.pt\); give one"):
        along.load(tmp_path)


def test_padding_stays_zero_and_the_prefix_collapses(t2i: Case) -> None:
    """Oracles 4 and 5: padded rows are exactly zero after every layer, and the prefix acts as one key."""
    net = t2i.model.target.net
    features = t2i.model.make_prompt("a red fox", None, t2i.model.sizes[0]).condition
    assert isinstance(features, Tensor) and t2i.model.target.projection is not None
    rows, mask = padded(features)
    prefix = reference.llamagen_prefix(t2i.source, rows)
    table = reference.rotation_table(SIDE, 64, 120)
    hidden = reference.llamagen_hidden(t2i.source, prefix, table, HEADS, reference.llamagen_visible(mask, 120))
    assert all(not layer[~mask].any() for layer in hidden)
    x = t2i.model.target.projection(rows)[None]
    cos_sin = net.arch.rope.cos_sin(net.arch.rope.prompt(116, x.device), x.dtype)[None]
    with torch.no_grad():
        alone = KVCache(net, 1, 256).append(x[:, :116], cos_sin, torch.tensor([116]), [116])
    assert not alone.any()


def test_one_pseudo_key_stands_for_the_prefix() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(shape, generator=generator) for shape in ((8,), (5, 8), (125, 8)))
    scores = torch.cat([torch.zeros(120), keys @ query])
    whole = scores.softmax(0) @ values
    collapsed = torch.cat([torch.tensor([120.0]).log(), keys @ query]).softmax(0)
    one = collapsed @ torch.cat([values[:120].mean(0, keepdim=True), values[120:]])
    torch.testing.assert_close(whole, one)


@pytest.mark.parametrize(
    ("given", "expected"),
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
def test_captions_are_cleaned(given: str, expected: str) -> None:
    assert clean(given).strip(" ,:") == expected


def test_a_file_without_its_text_side(tmp_path: Path) -> None:
    path, state = published.llamagen(tmp_path, "t2i")
    torch.save({"model": {n: v for n, v in state.items() if "uncond" not in n}}, path)
    with pytest.raises(CheckpointError, match=r"cls_embedding\.uncond_embedding; it is incomplete"):
        along.load(path)
