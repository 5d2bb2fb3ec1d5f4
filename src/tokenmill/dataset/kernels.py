"""The inner loops in C, if there was a compiler when the package was installed; if not, numpy does the same.

`TOKENMILL_COMPILED=0` in the environment leaves them out, so that the two can be compared.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

try:
    from tokenmill.dataset import compiled
except ImportError:
    compiled = None  # type: ignore[assignment]
if os.environ.get("TOKENMILL_COMPILED") == "0" or sys.byteorder != "little":
    compiled = None  # type: ignore[assignment]

__all__ = ["can_copy", "compiled"]

STORED = {np.dtype(np.uint16), np.dtype(np.int32)}
DELIVERED = {np.dtype(np.int64), np.dtype(np.int32)}


def can_copy(stored: np.dtype[Any], delivered: np.dtype[Any]) -> bool:
    """Whether tokens of one type are copied into batches of another in C."""
    return compiled is not None and stored in STORED and delivered in DELIVERED
