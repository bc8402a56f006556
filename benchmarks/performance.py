"""Puts records of `underdraw bench engine` into docs/performance.md.

python benchmarks/performance.py session/{anole-7b,llamagen-xl,agreement}.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from underdraw.bench.performance import write_page

if __name__ == "__main__":
    write_page([Path(name) for name in sys.argv[1:]], Path(__file__).resolve().parent.parent / "docs/performance.md")
