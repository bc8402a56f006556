"""Prompt files of every kind, read as streams; a malformed row is named by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from underdraw.errors import ConfigError
from underdraw.prompts import PromptFile, PromptRow, summarize_prompts

ROWS = [
    PromptRow("a", "a red fox", None, {"topic": "foxes", "rank": 1}),
    PromptRow("7", 'the word "fox", twice', 5, {"topic": "words", "rank": 2}),
]


def write_jsonl(path: Path) -> None:
    rows = [{"id": "a", "prompt": " a red fox ", "topic": "foxes", "rank": 1},
            {"id": 7, "prompt": 'the word "fox", twice', "seed": 5, "topic": "words", "rank": 2}]  # fmt: skip
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)))


def write_parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {
        "id": ["a", "7"], "prompt": ["a red fox", 'the word "fox", twice'], "seed": [None, 5],
        "topic": ["foxes", "words"], "rank": [1, 2], "thumbnail": [b"1", b"2"],
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_json_lines_and_parquet_keep_all_columns(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "p.jsonl")
    write_parquet(tmp_path / "p.parquet")
    assert list(PromptFile(str(tmp_path / "p.jsonl"))) == ROWS
    assert list(PromptFile(str(tmp_path / "p.parquet"))) == ROWS  # without its column of bytes
    assert list(PromptFile(str(tmp_path / "p.parquet"), limit=1)) == ROWS[:1]


def test_csv_has_text_columns(tmp_path: Path) -> None:
    text = 'topic,prompt,id,seed\nfoxes, a red fox ,a,\nwords,"the word ""fox"",\ntwice",7,5\n'
    (tmp_path / "p.csv").write_text(text)
    first, second = PromptFile(str(tmp_path / "p.csv"))
    assert first == PromptRow("a", "a red fox", None, {"topic": "foxes"})
    assert second == PromptRow("7", 'the word "fox",\ntwice', 5, {"topic": "words"})


def test_rows_without_id_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a fox\n\n a ghost \r\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a fox"}\n{"prompt": "a ghost"}\n')
    expected = [PromptRow(str(n), text, is_numbered=True) for n, text in enumerate(("a fox", "a ghost"))]
    assert list(PromptFile(str(tmp_path / "p.txt"))) == expected == list(PromptFile(str(tmp_path / "p.jsonl")))


def test_summary_depends_on_every_field(tmp_path: Path) -> None:
    summary = summarize_prompts(ROWS)
    assert summary.count == 2 and summary == summarize_prompts(iter(ROWS))
    changed = PromptRow("a", "a red fox", None, {"topic": "foxes", "rank": 3})
    assert summarize_prompts([changed, ROWS[1]]) != summary != summarize_prompts(ROWS[::-1])


def test_reading_is_lazy(tmp_path: Path) -> None:
    """A row at the end of a long file is not looked at before its turn."""
    with open(tmp_path / "p.jsonl", "w") as file:
        file.writelines('{"prompt": "a fox"}\n' for _ in range(100_000))
        file.write("broken\n")
    rows = iter(PromptFile(str(tmp_path / "p.jsonl")))
    assert next(rows).prompt == "a fox"
    with pytest.raises(ConfigError, match="line 100001 of"):
        list(rows)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n[1]\n', "line 2 of .* is not an object"),
        ("p.jsonl", '{"prompt": "a"\n', "line 1 of .* is not valid JSON"),
        ("p.jsonl", '{"text": "a"}\n', "line 1 of .* has no text in prompt"),
        ("p.jsonl", '{"prompt": "a", "seed": -1}\n', "the seed -1"),
        ("p.jsonl", '{"prompt": "a", "seed": true}\n', "the seed True"),
        ("p.jsonl", '{"prompt": "a", "id": [1]}\n', r"the id \[1\]"),
        ("p.jsonl", '{"prompt": "\\ud800"}\n', "line 1 of .*: the prompt"),
        ("p.csv", "text\nfox\n", "line 1 of .* has no column prompt"),
        ("p.csv", "prompt,id\nfox\n", "line 2 of .* has 1 columns, not 2"),
        ("p.csv", 'prompt\n"fox\n', "is not CSV"),
        ("p.csv", "prompt,seed\nfox,x\n", "the seed 'x'"),
        ("p.parquet", "no parquet", "cannot be read as Parquet"),
    ],
)
def test_malformed_rows_are_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(PromptFile(str(tmp_path / name)))


def test_parquet_needs_a_prompt_column(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match="no text column prompt; its columns are text"):
        list(PromptFile(str(tmp_path / "p.parquet")))
