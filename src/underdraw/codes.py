"""Numbers of a picture's cells as short text: how manifests and benchmarks keep them. Knows no model."""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from underdraw.errors import ConfigError


def pack(cells: NDArray[Any]) -> dict[str, Any]:
    """Whole numbers (rows, cols) as JSON: the two sides, and compressed little-endian 32-bit numbers in base64."""
    rows, cols = cells.shape
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(cells, dtype="<i4").tobytes(), 9)).decode()
    return {"rows": rows, "cols": cols, "data": data}


def unpack(packed: Any, where: str) -> NDArray[np.int32]:
    """What `pack` was given, (rows, cols); `where` says in an error where the text stood."""
    try:
        raw = zlib.decompress(base64.b64decode(packed["data"], validate=True))
        return np.frombuffer(raw, dtype="<i4").reshape(packed["rows"], packed["cols"]).astype(np.int32)
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error):
        raise ConfigError(f"the codes in {where} are damaged; draw the picture again.") from None
