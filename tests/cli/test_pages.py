"""The tables of the documentation are those of the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import call

from underdraw.bench.report import find_pages

ROOT = Path(__file__).parents[2]
FOLDERS = ("README.md", "docs", "src/underdraw/assets")
PAGES = [page.relative_to(ROOT) for name in FOLDERS for page in find_pages(ROOT / name)]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_tables_are_up_to_date(tmp_path: Path, page: Path) -> None:
    """`underdraw plot --page` writes them."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    copy, committed = tmp_path / page, (ROOT / page).read_text()
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(committed)
    assert call("plot", "--page", copy).code == 0
    assert copy.read_text() == committed, f"run underdraw plot --page {page}"
    assert "No results in" not in committed
