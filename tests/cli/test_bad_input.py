"""Bad input: one line on stderr, exit code 2, no traceback, and no file written or changed."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_checkpoint
from commands import call, start

from underdraw.nn.weights import load_weights, save_weights

Prepare = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """A command line with {model} and {here}, the files that exist before it, and a part of the error message."""

    name: str
    arguments: str | list[str]
    message: str
    prepare: Prepare | None = None

    def line(self, model: Path, here: Path) -> list[str]:
        words = self.arguments.split() if isinstance(self.arguments, str) else self.arguments
        return [word.format(model=model, here=here) for word in words]


def file(name: str, content: str | bytes = "") -> Prepare:
    def write(here: Path) -> None:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def copy(change: Callable[[Path], object]) -> Prepare:
    """A copy of the model at {here}/model, changed."""

    def make(here: Path) -> None:
        shutil.copytree(here.parent / "small", here / "model")
        change(here / "model")

    return make


def cut(name: str) -> Prepare:
    def shorten(model: Path) -> None:
        (model / name).write_bytes((model / name).read_bytes()[:-100])

    return copy(shorten)


def without_norms(model: Path) -> None:
    state, about = load_weights(model / "decoder")
    save_weights(model / "decoder", {key: value for key, value in state.items() if "norm" not in key}, about)


def other_drafter(here: Path) -> None:
    """A drafter for a target of another width."""
    model = small_checkpoint.write(here / "other")
    state, about = load_weights(model / "drafter")
    save_weights(here / "drafter", state, {**about, "target": {**about["target"], "dim": 128}})
    shutil.rmtree(model)


def run_with(settings: dict[str, object], lines: str = "") -> Prepare:
    def write(here: Path) -> None:
        file("f/run.json", json.dumps({"settings": settings}))(here)
        file("f/metadata.jsonl", lines)(here)

    return write


def damaged_manifest(here: Path) -> None:
    """A finished run with a broken line in the middle of its manifest."""
    model = (here.parent / "small").resolve()
    call("generate", "fox", "-m", model, "-n", 2, "-o", here / "f", "--seed", 1, "--tree", "none")
    path = here / "f" / "metadata.jsonl"
    path.write_text("{broken\n" + path.read_text())


ONE = "generate fox -m {model} -o {here}/a.png "
TWO = "generate fox -m {model} -n 2 -o {here}/f "
FILE = "generate -m {model} -o {here}/f --prompts {here}/"
HEADER = "Prompt\tCategory\tChallenge\tNote\n"

CASES = [
    # what to draw
    Case("no prompt", "generate -m {model} -o {here}/a.png", "give either a prompt or --prompts"),
    Case("empty prompt", ["generate", "", "-m", "{model}", "-o", "{here}/a.png"], "the prompt is empty"),
    Case("blank prompt", ["generate", " \n ", "-m", "{model}", "-o", "{here}/a.png"], "the prompt is empty"),
    Case("overlong prompt", ["generate", "fox " * 200, "-m", "{model}", "-o", "{here}/a.png"], "shorten it"),
    Case("not UTF-8", ["generate", "fox\udcff", "-m", "{model}", "-o", "{here}/a.png"], "not UTF-8 text"),
    Case("overlong negative", [*ONE.split(), "--negative", "fox " * 200], "shorten it"),
    Case("overlong negative of many", [*TWO.split(), "--negative", "fox " * 200], "shorten it"),
    Case("prompt and file", ONE + "--prompts {here}/p.txt", "give either a prompt or --prompts"),
    Case("two prompts", "generate fox bear -m {model}", "unexpected extra argument(s) (bear); put quotes around"),
    # options
    Case("unknown command", "genrate fox", "Did you mean 'generate'?"),
    Case("unknown option", ONE + "--sed 7", "--sed"),
    Case("option without value", ONE + "--seed", "--seed"),
    Case("temperature below 0", ONE + "--temperature -1", "temperature -1.0 must be 0"),
    Case("temperature nan", ONE + "--temperature nan", "temperature nan must be 0"),
    Case("temperature word", ONE + "--temperature hot", "'--temperature'"),
    Case("temperature tiny", ONE + "--temperature 1e-9", "too small to divide by"),
    Case("top-k below 0", ONE + "--top-k -3", "top_k -3"),
    Case("top-k fraction", ONE + "--top-k 2.5", "'--top-k'"),
    Case("top-p zero", ONE + "--top-p 0", "top_p 0.0"),
    Case("top-p above 1", ONE + "--top-p 1.5", "top_p 1.5"),
    Case("guidance below 0", ONE + "--guidance -2", "guidance -2.0"),
    Case("guidance nan", TWO + "--guidance nan", "guidance nan"),
    Case("guidance infinite", ONE + "--guidance inf", "guidance inf"),
    Case("seed below 0", ONE + "--seed -1", "seed -1 is not allowed"),
    Case("seed too large", ONE + f"--seed {2**70}", "2**62 - 1"),
    Case("seed fraction", ONE + "--seed 1.5", "'--seed': 1.5 should be a whole number."),
    Case("no images", ONE + "--n 0", "0 should be greater than or equal to 1"),
    Case("too many images", ONE + "--n 1000000000", "1000000000 should be less than or equal to 1000000"),
    Case("no batch", TWO + "--batch 0", "'--batch': 0 should be greater than or equal to 1"),
    Case("huge batch", TWO + "--batch 100000", "'--batch': 100000 should be less than or equal to 256"),
    Case("batch of one", ONE + "--batch 4", "--batch is for many images"),
    Case("height", ONE + "--height 500", "cannot generate 500x12"),
    Case("width", ONE + "--width 0", "cannot generate 12x0"),
    Case("limit without file", ONE + "--limit 3", "use it with --prompts"),
    # parts
    Case("unknown tree", ONE + "--tree adjacancy", "Did you mean 'adjacency'?"),
    Case("tree option", ONE + "--tree adjacency:deep=3", "unknown option of policy adjacency 'deep'"),
    Case("tree value", ONE + "--tree adjacency:init=sideways", "sideways"),
    Case("tree too large", ONE + "--tree confidence:nodes=1000", "at most 128"),
    Case("tree syntax", ONE + "--tree adjacency:init", "is not key=value"),
    Case("tree without name", ONE + "--tree :", "has no name"),
    Case("tree file", ONE + "--tree static:shape={here}/no.json", "cannot be read"),
    Case("unknown verifier", ONE + "--verifier exakt", "Did you mean 'exact'?"),
    Case("verifier value", ONE + "--verifier lantern:delta=7", "must lie in [0, 1]"),
    Case("verifier and drafter", TWO + "--verifier rejection --drafter forced", "rejection needs"),
    Case("unknown drafter", ONE + "--drafter eagel", "there is no drafter 'eagel'"),
    Case("no drafter", ONE + "--drafter none", "--tree none"),
    Case("drafter without weights", ONE + "--drafter {here}", "holds no weights"),
    Case("drafter of another", ONE + "--drafter {here}/drafter", "was trained for a target", other_drafter),
    Case("drafter that is none", ONE + "--drafter {model}/decoder", "holds no drafter"),
    Case("device", ONE + "--device gpu", "unknown device 'gpu'"),
    Case("device without memory", ONE + "--device meta", "not supported"),
    Case("device that is not there", ONE + "--device cuda:99", "no CUDA device"),
    Case("dtype", ONE + "--dtype int3", "unknown dtype 'int3'"),
    # models
    Case("no model", "generate fox -m no-such-model -o {here}/a.png", "there is no model 'no-such-model'"),
    Case("empty folder", "generate fox -m {here} -o {here}/a.png", "of no supported family"),
    Case("text file", "generate fox -m {here}/p.txt -o {here}/a.png", "p.txt", file("p.txt", "fox")),
    Case("other family", "generate fox -m {here}/m -o {here}/a.png", "bert",
         file("m/config.json", '{"model_type": "bert"}')),
    Case("broken config", "generate fox -m {here}/m -o {here}/a.png", "cannot be read", file("m/config.json", "{")),
    Case("no weights", "generate fox -m {here}/m.pt -o {here}/a.png", "not a file of weights", file("m.pt", "hello\n")),
    Case("list as config", "generate fox -m {here}/m -o {here}/a.png", "of a JSON", file("m/config.json", "[]")),
    Case("cut decoder", "generate fox -m {here}/model -o {here}/a.png", "damaged", cut("decoder/model-0.safetensors")),
    Case("cut tokenizer", "generate fox -m {here}/model -o {here}/a.png", "damaged",
         cut("tokenizer/model-0.safetensors")),
    Case("cut drafter", "generate fox -m {here}/model -o {here}/a.png", "damaged", cut("drafter/model-0.safetensors")),
    Case("cut vocabulary", "generate fox -m {here}/model -o {here}/a.png", "vocabulary", cut("decoder/text.json")),
    Case("no decoder", "generate fox -m {here}/model -o {here}/a.png", "holds no weights",
         copy(lambda model: (model / "decoder" / "model-0.safetensors").unlink())),
    Case("no vocabulary", "generate fox -m {here}/model -o {here}/a.png", "vocabulary",
         copy(lambda model: (model / "decoder" / "text.json").unlink())),
    Case("missing tensors", "generate fox -m {here}/model -o {here}/a.png", "files do not match", copy(without_norms)),
    Case("broken choice", "generate fox -m {here}/model -o {here}/a.png", "underdraw.json",
         copy(lambda model: (model / "underdraw.json").write_text("{"))),
    Case("choice of numbers", "generate fox -m {here}/model -o {here}/a.png", "drafter, tree and verifier",
         copy(lambda model: (model / "underdraw.json").write_text('{"tree": 3}'))),
    # outputs
    Case("output exists", ONE, "exists; give another name", file("a.png", "mine")),
    Case("output is a folder", ONE, "is a folder", file("a.png/x", "mine")),
    Case("output is no PNG", "generate fox -m {model} -o {here}/a.jpg", "does not end in .png"),
    Case("output without folder", "generate fox -m {model} -o {here}/no/a.png", "there is no folder"),
    Case("output in a file", "generate fox -m {model} -o {here}/p/a.png", "there is no folder", file("p", "mine")),
    Case("output unwritable", "generate fox -m {model} -o /proc/a.png", "cannot be written"),
    Case("heat map exists", ONE + "--heatmap {here}/h.png", "exists", file("h.png", "mine")),
    Case("heat map is no PNG", ONE + "--heatmap {here}/h.pdf", "does not end in .png"),
    Case("same output twice", ONE + "--heatmap {here}/a.png", "named twice"),
    Case("comparison exists", ONE + "--compare-image {here}/c.png", "exists", file("c.png", "mine")),
    Case("heat map of many", TWO + "--heatmap {here}/h.png", "for one image"),
    Case("comparison of many", TWO + "--compare-image {here}/c.png", "for one image"),
    # folders
    Case("many without folder", "generate fox -m {model} -n 2", "name it with --out"),
    Case("many into a picture", ONE + "-n 2", "need a folder"),
    Case("many into a file", TWO, "need a folder", file("f", "mine")),
    Case("many below a file", "generate fox -m {model} -n 2 -o {here}/p/f", "is a file", file("p", "mine")),
    Case("many unwritable", "generate fox -m {model} -n 2 -o /proc/f", "cannot be written"),
    Case("folder with other things", TWO, "is not empty and has no run.json", file("f/letter.txt", "mine")),
    Case("run with other settings", TWO + "--seed 9", "other settings (seed 8, not 9", run_with({"seed": 8})),
    Case("broken run", TWO, "cannot be read", file("f/run.json", "{")),
    Case("run without settings", TWO, "has no settings", file("f/run.json", "{}")),
    Case("broken manifest", TWO + "--seed 1 --tree none", "line 1 of", damaged_manifest),
    # files of prompts
    Case("no file", FILE + "p.txt", "does not exist"),
    Case("folder as file", FILE + "p", "is a folder", file("p/x", "")),
    Case("empty file", FILE + "p.txt", "holds no prompts", file("p.txt", "\n \n")),
    Case("file in Latin-1", FILE + "p.txt", "line 2 of", file("p.txt", b"fox\nl\xf8ve\n")),
    Case("binary file", FILE + "p.txt", "line 1 of", file("p.txt", "a\0b")),
    Case("unknown kind of file", FILE + "p.xml", "unknown prompt file type '.xml'", file("p.xml", "fox")),
    Case("no first prompts", FILE + "p.txt --limit 0", "'--limit': 0 should be", file("p.txt", "fox")),
    Case("overlong line", FILE + "p.txt", "prompt 2: ", file("p.txt", "fox\n" + "fox " * 99)),
    Case("only overlong lines", FILE + "p.txt --overlong skip", "can read none",
         file("p.txt", ("fox " * 99 + "\n") * 2)),
    Case("overlong otherwise", FILE + "p.txt --overlong cut", "cut", file("p.txt", "fox")),
    Case("parti without data", "generate -m {model} -o {here}/f --prompts parti", "--data FOLDER"),
    Case("parti elsewhere", "generate -m {model} -o {here}/f --prompts parti --data {here}", "holds no Parti"),
    Case("coco elsewhere", "generate -m {model} -o {here}/f --prompts coco --data {here}", "annotations_trainval2017"),
    Case("table without header", FILE + "p.tsv", "line 1 of", file("p.tsv", "fox\ta\tb\tc")),
    Case("table with a short row", FILE + "p.tsv", "line 3 of", file("p.tsv", HEADER + "a\tb\tc\td\na\tb\n")),
    Case("table without a prompt", FILE + "p.tsv", "line 2 of", file("p.tsv", HEADER + " \tb\tc\td")),
    Case("captions that are no JSON", FILE + "p.json", "line 2 of", file("p.json", '{"annotations":\n oh}')),
    Case("captions without list", FILE + "p.json", 'no list "annotations"', file("p.json", '{"images": []}')),
    Case("captions without text", FILE + "p.json", "number 0 of", file("p.json", '{"annotations": [{"id": 1}]}')),
    Case("captions of lists", FILE + "p.json", "number 0 of", file("p.json", '{"annotations": [[]]}')),
]  # fmt: skip


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
    }


@pytest.fixture
def here(small_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The working directory: an empty folder next to a link to the model."""
    (tmp_path / "small").symlink_to(small_model)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("UNDERDRAW_DATA", raising=False)
    return folder


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_prints_one_line_and_writes_nothing(case: Case, small_model: Path, here: Path) -> None:
    if case.prepare is not None:
        case.prepare(here)
    before = contents(here)
    done = call(*case.line(small_model, here))
    assert done.code == 2, done
    assert case.message in done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1 and done.out == ""
    assert contents(here) == before


def test_missing_package_is_named(small_model: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    done = call("generate", "fox", "-m", small_model, "-o", "a.png")
    assert done.code == 2 and "pip install tqdm" in done.err and contents(here) == {}


def test_model_that_cannot_be_downloaded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    done = call("generate", "fox", "-m", "nobody/nothing", "-o", "a.png")
    assert done.code == 2 and "nobody/nothing could not be downloaded" in done.err and done.err.count("\n") == 1


def test_full_disk(small_model: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the operating system while the image is written is one line too, and leaves no partial file."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    done = call("generate", "fox", "-m", small_model, "-o", "a.png", "--tree", "none")
    assert done.code == 2 and "No space left on device" in done.err and contents(here) == {}


@pytest.mark.parametrize("words", ["generate fox -o a.jpg", "generate fox\udcff -m {model} -o a.png", "draw"])
def test_in_a_subprocess(words: str, here: Path, small_model: Path) -> None:
    process = start(*words.format(model=small_model).split(), cwd=here)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and contents(here) == {}
