from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

def copy_rows(indices: Integers, itemsize: int, places: Integers | None, inputs: Array, targets: Array, /) -> None: ...
def copy_pieces(
    edges: Integers,
    indices: Integers,
    lengths: Integers,
    ignored: int,
    itemsize: int,
    places: Integers | None,
    inputs: Array,
    targets: Array,
    /,
) -> None: ...
def spread(
    lengths: Integers,
    ids: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32] | None,
    segment_ids: npt.NDArray[np.int32] | None,
    /,
) -> None: ...
