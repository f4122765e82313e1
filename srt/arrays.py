"""The types of the numpy arrays that layers exchange."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
"""Token ids, slots, rows, lengths."""
Float32Array = npt.NDArray[np.float32]
