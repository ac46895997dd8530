"""Tensors for the tests of this room: any datatype, shape and bits."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headrace.tensor import Datatype, Tensor

SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
NAMES = st.text(min_size=1, max_size=12)
FLOATS = (Datatype.FP16, Datatype.FP32, Datatype.FP64, Datatype.BF16)


def is_finite(tensor: Tensor) -> np.ndarray:
    """Return where a floating-point tensor is neither NaN nor infinite, without a warning for any bits."""
    with np.errstate(invalid="ignore"):
        return np.isfinite(tensor.array.astype(np.float64))


@st.composite
def tensors(draw: st.DrawFn, *, finite: bool = False, text: bool = False) -> Tensor:
    """Any bits of any datatype; `finite` leaves out what JSON cannot say, `text` keeps BYTES to UTF-8."""
    datatype = draw(st.sampled_from(list(Datatype)))
    shape = draw(SHAPES)
    count = int(np.prod(shape))
    if datatype is Datatype.BYTES:
        element = st.text(max_size=6).map(str.encode) if text else st.binary(max_size=6)
        held = np.empty(count, dtype=object)
        held[:] = draw(st.lists(element, min_size=count, max_size=count))
        return Tensor(datatype, held.reshape(shape))
    if datatype is Datatype.BOOL:
        flags = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return Tensor(datatype, np.array(flags, dtype=bool).reshape(shape))
    size = count * datatype.numpy.itemsize
    array = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype=datatype.numpy).copy()
    if finite and datatype in FLOATS:
        array[~is_finite(Tensor(datatype, array))] = 1
    return Tensor(datatype, array.reshape(shape))


#: A named set of tensors.
def named(**options: bool) -> st.SearchStrategy[dict[str, Tensor]]:
    return st.dictionaries(NAMES, tensors(**options), max_size=3)
