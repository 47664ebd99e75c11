"""The spec of a tensordict that is at hand."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from ..errors import suggests_keywords
from .base import TensorSpec
from .composite import Composite, is_nest
from .non_tensor import NonTensor
from .stacked_composite import StackedComposite
from .unbounded import Unbounded
from .values import SpecTypeError


@suggests_keywords()
def make_composite_from_td(td: Any, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False) -> Composite:
    """Return the spec of a tensordict or tensorclass: an Unbounded for each tensor, a NonTensor for other data.

    Shape, device, element types and nests are those of the tensordict, a NonTensor has the first datum as its example,
    and `data_cls` is the class of the tensordict, so that values are of it. `unsqueeze_null_shapes` makes `[1]` of the
    shape `[]`, `dynamic_shape` lets the last dimension of tensors have any size, unless it is one of the batch. A lazy
    stack becomes a StackedComposite. SpecTypeError (a TypeError) for what is neither.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import make_composite_from_td
    >>> make_composite_from_td(TensorDict({"observation": torch.zeros(5, 3)}, [5]))["observation"].shape
    torch.Size([5, 3])
    """
    if not is_tensor_collection(td):
        raise SpecTypeError(f"td is a {type(td).__name__}, expected a tensordict or a tensorclass")
    options = {"unsqueeze_null_shapes": unsqueeze_null_shapes, "dynamic_shape": dynamic_shape}
    if isinstance(td, LazyStackedTensorDict):
        return StackedComposite(*(make_composite_from_td(one, **options) for one in td.tensordicts), dim=td.stack_dim)
    batch = torch.Size(td.batch_size)
    entries: dict[str, TensorSpec] = {}
    for name in list(td.keys()):
        value = td.get(name)
        if is_non_tensor(value):
            entries[name] = NonTensor(value.batch_size, value.device, example_data=_first(value))
        elif is_nest(value):
            entries[name] = make_composite_from_td(value, **options)
        else:
            entries[name] = _tensor(value, len(batch), unsqueeze_null_shapes, dynamic_shape)
    data_cls = None if isinstance(td, TensorDictBase) and type(td) is not TensorDict else type(td)
    return Composite(entries, shape=batch, device=td.device, data_cls=data_cls)


def _tensor(value: torch.Tensor, lead: int, unsqueeze: bool, dynamic: bool) -> TensorSpec:
    shape = [*value.shape] or [1] * unsqueeze
    if dynamic and len(shape) > lead:
        shape[-1] = -1
    return Unbounded(shape, value.device, value.dtype)


def _first(value: Any) -> Any:
    while isinstance(value, NonTensorStack) and len(value):
        value = value[0]
    return None if isinstance(value, NonTensorStack) else value.data
