"""Names for the arrays that compiled loops read and write."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Places = NDArray[np.int64]
"""Positions, lengths or counts."""
Marks = NDArray[np.bool_]
Shares = NDArray[np.float64]
