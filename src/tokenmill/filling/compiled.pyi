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
def find_repetitions(
    inputs: Array,
    lengths: Integers,
    min_period: int,
    max_period: int,
    max_count: int,
    found: Integers,
    /,
) -> None: ...
def drop_targets(
    inputs: Array,
    targets: Array,
    dropped: npt.NDArray[np.uint32],
    size: int,
    context: int,
    ignored: int,
    counts: Integers,
    /,
) -> None: ...
