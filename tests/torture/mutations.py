"""Structured damage: of bytes, of JSON, of safetensors files, and of what kind of file a file is. All by a seed."""

from __future__ import annotations

import json
import math
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SEED = int(os.environ.get("UNDERDRAW_TORTURE_SEED", "19"))
Damage = Callable[[random.Random, Path], str]
"""Damages a file and says how."""
WRONG_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 10**18, 10**30, 1.5, -0.5, math.nan, math.inf, -math.inf, "", "x", "\0", "\ud7ff" * 9,
    "../../etc/passwd", "/etc/passwd", [], {}, [[]], [1, "2", None], {"a": {"b": []}}, "9" * 5000, [0] * 1000,
)  # fmt: skip


def case_random(*parts: object) -> random.Random:
    """The source of randomness of one case."""
    return random.Random(f"{SEED}/{'/'.join(map(str, parts))}")


def damage_bytes(rng: random.Random, path: Path) -> str:
    raw = bytearray(path.read_bytes())
    kind = rng.choice(["empty", "truncate", "flip", "zeros", "garbage", "insert", "append", "double", "text"])
    at, count = rng.randrange(max(len(raw), 1)), rng.choice([1, 8, 64, 1000])
    if kind == "flip":
        for _ in range(count):
            if raw:
                raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    changed = {
        "empty": b"",
        "truncate": bytes(raw[:at]),
        "flip": bytes(raw),
        "zeros": bytes(raw[:at]) + bytes(count) + bytes(raw[at + count :]),
        "garbage": rng.randbytes(count),
        "insert": bytes(raw[:at]) + rng.randbytes(count) + bytes(raw[at:]),
        "append": bytes(raw) + rng.randbytes(count),
        "double": bytes(raw) * 2,
        "text": b"<html>404 Not Found</html>\n",
    }[kind]
    path.write_bytes(changed)
    return f"{kind} at {at}, {count} bytes"


def damage_kind(rng: random.Random, path: Path) -> str:
    """Replace the file by something that is no regular file."""
    kind = rng.choice(["missing", "folder", "fifo", "loop", "dangling", "/dev/zero", "/dev/null", "itself"])
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind in ("loop", "itself"):
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind.startswith("/dev"):
        path.symlink_to(kind)
    return kind


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, child in items for inner in _paths(child, (*path, key)))]


def change_value(rng: random.Random, value: Any) -> tuple[Any, str]:
    """A JSON value with one part deleted, retyped, resized or nested deeply."""
    paths = _paths(value)
    path = rng.choice(paths[: 40 + len(paths) // 50])  # long lists hold the same kind of value again and again
    kind = rng.choice(["delete", "retype", "retype", "retype", "deep", "add"])
    new: Any = rng.choice(WRONG_VALUES)
    if kind == "deep":
        new = json.loads("[" * 200 + "]" * 200)
    if not path:
        return (new if kind != "delete" else {}), f"{kind} the whole"
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    if kind == "delete":
        del parent[path[-1]]
    elif kind == "add" and isinstance(parent, dict):
        parent[rng.choice(["x", "", "__proto__", "kind"])] = new
    else:
        parent[path[-1]] = new
    return value, f"{kind} {'.'.join(map(str, path))} = {str(new)[:40]!r}"


def damage_json(rng: random.Random, path: Path) -> str:
    if rng.random() < 0.1:
        deep, large = b"[" * 100_000 + b"]" * 100_000, b'"' + b"x" * 3_000_000 + b'"'
        path.write_bytes(rng.choice([deep, large, b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"1e999", b"9" * 10_000]))
        return "not JSON for us"
    value, what = change_value(rng, json.loads(path.read_text(encoding="utf-8")))
    path.write_bytes(json.dumps(value).encode("utf-8", "surrogatepass"))
    return what


def damage_safetensors(rng: random.Random, path: Path) -> str:
    """Change the header, the metadata inside it, or the values of a tensor."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    kind = rng.choice(["header", "header", "about", "about", "about", "values", "values", "length"])
    names = [name for name in header if name != "__metadata__"]
    what = kind
    if kind == "header":
        header, what = change_value(rng, header)
    elif kind == "about":
        metadata = header["__metadata__"]
        key = rng.choice(sorted(metadata))
        try:
            value, what = change_value(rng, json.loads(metadata[key]))
        except json.JSONDecodeError:
            value, what = "damaged", key
        metadata[key] = json.dumps(value)
    elif kind == "values":
        name = rng.choice(names)
        begin, end = header[name]["data_offsets"]
        dtype = {"BF16": "<u2", "F32": "<f4", "I8": "i1", "I32": "<i4"}[header[name]["dtype"]]
        values = np.frombuffer(bytes(data[begin:end]), dtype=dtype).copy()
        bad = {"BF16": [0x7FC0, 0x7F80, 0xFF80, 0x7F7F], "F32": [np.nan, np.inf, -np.inf, 3e38]}
        bad_values = bad.get(header[name]["dtype"], [-128, 127])
        values[rng.randrange(len(values)) if rng.random() < 0.5 else slice(None)] = rng.choice(bad_values)
        data[begin:end] = values.tobytes()
        what = f"values of {name}"
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    size = rng.choice([0, 1, 2**63, len(text) * 2, len(text) - 1]) if kind == "length" else len(text)
    path.write_bytes(struct.pack("<Q", size) + text + bytes(data))
    return what


def damage_file(rng: random.Random, path: Path) -> str:
    """Damage a file in one of the ways that fit it."""
    ways: list[Damage] = [damage_bytes, damage_kind]
    if path.suffix == ".json":
        ways += [damage_json] * 4
    if path.suffix == ".safetensors":
        ways += [damage_safetensors] * 5
    way = rng.choice(ways)
    return f"{path.parent.name}/{path.name}: {way.__name__}: {way(rng, path)}"


def damage_lines(rng: random.Random, path: Path) -> str:
    """Damage a JSON Lines file: one row changed, repeated, cut, moved, or bytes of the whole file."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    kind = rng.choice(["row", "row", "row", "repeat", "cut", "delete", "shuffle", "bytes", "blank", "crlf", "kind"])
    index = rng.randrange(len(lines))
    if kind == "bytes":
        return damage_bytes(rng, path)
    if kind == "kind":
        return damage_kind(rng, path)
    if kind == "row":
        value, kind = change_value(rng, json.loads(lines[index]))
        lines[index] = json.dumps(value)
    elif kind == "repeat":
        lines.insert(rng.randrange(len(lines)), lines[index])
    elif kind == "delete":
        del lines[index]
    elif kind == "shuffle":
        rng.shuffle(lines)
    elif kind == "blank":
        lines.insert(index, "")
    end = "\r\n" if kind == "crlf" else "\n"
    text = "".join(f"{line}{end}" for line in lines)
    path.write_bytes(text.encode("utf-8", "surrogatepass")[: -rng.randrange(1, 40) if kind == "cut" else None])
    return f"{kind} of line {index}"
