"""Conversions between specs and gymnasium spaces, tensordicts and datasets, and the former names of specs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from ..errors import FormatError, SchemaError, UsageError, suggests_keywords
from ..format.contracts import StepReader
from ..ted.rules import bound_array
from ..ted.schema import NEXT, Field, Key, safe_part
from .base import DeviceLike, LazyStack, SpecTypeError, Stacked, TensorSpec, brief
from .bounded import Bounded, BoundedContinuous, BoxSpec, Unbounded, UnboundedContinuous, UnboundedDiscrete
from .bridge import as_own
from .categorical import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from .composite import Composite, StackedComposite, is_nest
from .non_tensor import NonTensor

_PARTS = {
    "Box": ("low", "high", "shape", "dtype"), "Dict": ("spaces",), "Discrete": ("n", "start", "dtype"),
    "MultiBinary": ("n",), "MultiDiscrete": ("nvec", "start", "dtype"), "Text": (), "Tuple": ("spaces",),
}  # fmt: skip


@suggests_keywords()
def spec_from_space(space: Any, device: DeviceLike | None = None) -> TensorSpec:
    """Return the spec of a gymnasium space; gymnasium need not be installed.

    Elements of a Tuple are named by their numbers, as in the data. A Discrete space that does not start at zero becomes
    a Bounded, a Text space a NonTensor. A subspace of None stays None.

    Args:
        space: a gymnasium space, or its JSON document as in `Manifest.spaces`: `{"type": "Box", "dtype", "shape",
            "low", "high"}` (bounds are numbers, nested lists or the strings `"inf"` and `"-inf"`), `Discrete` (n,
            start), `MultiDiscrete` (nvec, start), `MultiBinary` (n), `Text`, and `Dict` and `Tuple` with their
            `subspaces`.
        device: the device of the spec.

    Raises:
        FormatError (a ValueError): the space is of another kind, or invalid.
    """
    try:
        return _spec(_document(space), device)
    except (FormatError, RecursionError):
        raise
    except (UsageError, SchemaError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(f"{brief(space)} is not a space: {error}") from error


def _document(space: Any) -> Mapping[str, Any]:
    """Return a gymnasium space as a document; documents are returned unchanged."""
    if isinstance(space, Mapping) and "type" in space:
        return space
    for kind in type(space).__mro__:
        if kind.__name__ in _PARTS and kind.__module__.partition(".")[0] in {"gym", "gymnasium"}:
            found = {part: getattr(space, part) for part in _PARTS[kind.__name__] if hasattr(space, part)}
            if "spaces" in found:
                found["subspaces"] = found.pop("spaces")
            return {"type": kind.__name__, **found}
    raise FormatError(f"{brief(space)} is not a space, expected one of the types {', '.join(_PARTS)}")


def _spec(space: Mapping[str, Any], device: DeviceLike | None) -> TensorSpec:
    kind = space["type"]
    if kind not in _KINDS:
        raise FormatError(f"a space of type {kind!r} has no spec; known: {', '.join(_PARTS)}")
    return _KINDS[kind](space, device)


def _dtype(space: Mapping[str, Any], default: str) -> torch.dtype:
    name = np.dtype(space.get("dtype") or default).name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"a space of element type {name!r} has no spec: torch has no such type")
    return found


def _box(space: Mapping[str, Any], device: DeviceLike | None) -> TensorSpec:
    shape = _sizes(space["shape"])
    low, high = (np.broadcast_to(bound_array(space[bound]), shape) for bound in ("low", "high"))
    return Bounded(low, high, shape, device, _dtype(space, "float32"))


def _discrete(space: Mapping[str, Any], device: DeviceLike | None) -> TensorSpec:
    n, start, dtype = int(space["n"]), int(space.get("start", 0)), _dtype(space, "int64")
    if start:
        return Bounded(start, start + n - 1, (), device, dtype)
    if n < 1:
        raise FormatError(f"a Discrete space has {n} values, expected at least 1")
    return Categorical(n, (), device, dtype)


def _multi_discrete(space: Mapping[str, Any], device: DeviceLike | None) -> TensorSpec:
    counts, dtype = np.asarray(space["nvec"]), _dtype(space, "int64")
    if counts.dtype.kind not in "iu":
        raise FormatError(f"a MultiDiscrete space has the nvec {space['nvec']}, expected whole numbers")
    start = np.asarray(space.get("start", 0))
    if start.any():
        start = np.broadcast_to(start, counts.shape)
        return Bounded(start, start + counts - 1, counts.shape, device, dtype)
    return MultiCategorical(torch.as_tensor(counts.astype(np.int64)), counts.shape, device, dtype, None, False)


def _sizes(sizes: Any) -> tuple[int, ...]:
    shape = tuple(int(size) for size in (sizes if isinstance(sizes, Iterable) else (sizes,)))
    if any(size < 0 for size in shape):
        raise FormatError(f"a space has the shape {list(shape)}, expected sizes from 0")
    return shape


def _nest(space: Mapping[str, Any], device: DeviceLike | None) -> TensorSpec:
    children = space["subspaces"]
    named = children.items() if isinstance(children, Mapping) else enumerate(children)
    specs = Composite(device=device)
    for name, child in named:
        specs.set(str(name), None if child is None else _spec(_document(child), device))
    return specs


_KINDS: dict[str, Callable[[Mapping[str, Any], DeviceLike | None], TensorSpec]] = {
    "Box": _box,
    "Dict": _nest,
    "Discrete": _discrete,
    "MultiBinary": lambda space, device: Binary(shape=_sizes(space["n"]), device=device),
    "MultiDiscrete": _multi_discrete,
    "Text": lambda space, device: NonTensor((), device, example_data=""),
    "Tuple": _nest,
}


def space_from_spec(spec: TensorSpec) -> Any:
    """Return the gymnasium space of a spec's values.

    Spaces have neither masks nor one-hot rows, so the space may contain more values than the spec.

    | spec | space |
    |---|---|
    | Composite | Dict |
    | Categorical | Discrete, or MultiDiscrete if it has a shape |
    | MultiCategorical | MultiDiscrete |
    | Binary, OneHot, MultiOneHot | MultiBinary |
    | Bounded of whole numbers without a shape | Discrete that starts at the lower bound |
    | other Bounded, Unbounded | Box |
    | NonTensor with text | Text |

    Raises:
        ImportError: gymnasium is not installed.
        SchemaError (a RuntimeError): a size is unknown, NumPy lacks the element type, or there is no matching space.
    """
    from gymnasium import spaces

    spec = as_own(spec)
    if isinstance(spec, LazyStack):
        return spaces.Tuple([space_from_spec(one) for one in spec.specs])
    if isinstance(spec, Composite):
        entries = {str(name): entry for name, entry in spec.items() if entry is not None}
        return spaces.Dict({name: space_from_spec(entry) for name, entry in entries.items()})
    if -1 in spec.shape:
        raise SchemaError(f"a spec of shape {list(spec.shape)} has no space: a size is unknown")
    if isinstance(spec, NonTensor) and isinstance(spec.example_data, str) and not spec.batched:
        return spaces.Text(_LONGEST_TEXT)
    if isinstance(spec, Binary | OneHot | MultiOneHot):
        return spaces.MultiBinary(list(spec.shape))
    if isinstance(spec, Categorical):
        dtype = _integers(spec)
        if not spec.shape:
            return spaces.Discrete(spec.n, dtype=dtype)
        return spaces.MultiDiscrete(np.full(tuple(spec.shape), spec.n), dtype=dtype)
    if isinstance(spec, MultiCategorical):
        return spaces.MultiDiscrete(spec.nvec.cpu().numpy(), dtype=_integers(spec))
    if isinstance(spec, BoxSpec):
        return _box_of(spec)
    raise SchemaError(f"there is no space that matches a {type(spec).__name__}")


_LONGEST_TEXT = 2**16


def _numpy_type(spec: TensorSpec) -> Any:
    name = str(spec.dtype).removeprefix("torch.")
    if name == "bfloat16" or (spec.dtype is not None and spec.dtype.is_complex):
        raise SchemaError(f"a spec of {name} has no space: gymnasium has no such numbers")
    return np.dtype(name).type


def _integers(spec: TensorSpec) -> Any:
    found = _numpy_type(spec)
    return found if np.issubdtype(found, np.integer) else np.int64


def _box_of(spec: BoxSpec) -> Any:
    from gymnasium import spaces

    kind = _numpy_type(spec)
    if isinstance(spec, Bounded) and spec.domain == "discrete" and not spec.shape and np.issubdtype(kind, np.integer):
        start = int(spec.low)
        return spaces.Discrete(int(spec.high) - start + 1, start=start, dtype=kind)
    shape = tuple(spec.shape)
    if kind is np.bool_:
        return spaces.MultiBinary(list(shape))
    low, high = spec.low.cpu().numpy(), spec.high.cpu().numpy()
    if isinstance(spec, Unbounded) and np.issubdtype(kind, np.floating):
        low, high = np.full(shape, -np.inf, kind), np.full(shape, np.inf, kind)
    return spaces.Box(low.astype(kind), high.astype(kind), shape, kind)


@suggests_keywords()
def make_composite_from_td(td: Any, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False) -> Composite:
    """Return the spec of a tensordict or tensorclass: an Unbounded for each tensor, a NonTensor for other data.

    Shape, device, element types and nesting are taken from the tensordict, and its class becomes `data_cls`, so that
    drawn values have the same class. A NonTensor has the first datum as its example. A lazy stack becomes a
    StackedComposite.

    Args:
        td: a tensordict or tensorclass; SpecTypeError (a TypeError) for anything else.
        unsqueeze_null_shapes: turn the shape `[]` into `[1]`.
        dynamic_shape: allow any size for the last dimension of tensors, unless it belongs to the batch.

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


class FormerName(type):
    """The metaclass of former names: a call warns and creates an instance of `now`; `isinstance` also checks `now`."""

    now: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"{cls.__name__} is now called {cls.now.__name__}", DeprecationWarning, stacklevel=2)
        return cls.now(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.now)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.now)


class BinaryDiscreteTensorSpec(metaclass=FormerName):
    """The former name of Binary; a call warns."""

    now = Binary


class BoundedTensorSpec(metaclass=FormerName):
    """The former name of Bounded; a call warns."""

    now = Bounded


class CompositeSpec(metaclass=FormerName):
    """The former name of Composite; a call warns."""

    now = Composite


class DiscreteTensorSpec(metaclass=FormerName):
    """The former name of Categorical; a call warns."""

    now = Categorical


class LazyStackedCompositeSpec(metaclass=FormerName):
    """The former name of StackedComposite; a call warns."""

    now = StackedComposite


class LazyStackedTensorSpec(metaclass=FormerName):
    """The former name of Stacked; a call warns."""

    now = Stacked


class MultiDiscreteTensorSpec(metaclass=FormerName):
    """The former name of MultiCategorical; a call warns."""

    now = MultiCategorical


class MultiOneHotDiscreteTensorSpec(metaclass=FormerName):
    """The former name of MultiOneHot; a call warns."""

    now = MultiOneHot


class NonTensorSpec(metaclass=FormerName):
    """The former name of NonTensor; a call warns."""

    now = NonTensor


class OneHotDiscreteTensorSpec(metaclass=FormerName):
    """The former name of OneHot; a call warns."""

    now = OneHot


class UnboundedContinuousTensorSpec(metaclass=FormerName):
    """The former name of UnboundedContinuous; a call warns."""

    now = UnboundedContinuous


class UnboundedDiscreteTensorSpec(metaclass=FormerName):
    """The former name of UnboundedDiscrete; a call warns."""

    now = UnboundedDiscrete


def dataset_specs(reader: StepReader) -> Composite:
    """Return the spec of one row of a dataset, with the same keys as a batch.

    The specs of observations and actions are made from the spaces that the source has recorded, if they have as many
    elements as the field: `Bounded`, `Categorical` and so on, with the stored element type. Every other field is an
    Unbounded. The data may contain values outside of the recorded spaces; `check` counts them (TED015).
    """
    recorded = {
        key: leaf
        for name, space in reader.manifest.spaces.items()
        if space is not None
        for key, leaf in _leaves(spec_from_space(space), (name,))
    }
    specs = Composite()
    for field in reader.fields:
        specs.set(field.key, _spec_of(field, recorded.get(field.key[field.key[0] == NEXT :])))
    return specs


def _leaves(spec: TensorSpec, key: Key) -> Iterator[tuple[Key, TensorSpec]]:
    if not isinstance(spec, Composite):
        yield key, spec
        return
    for name, entry in spec.items():
        if entry is not None:
            yield from _leaves(entry, (*key, safe_part(str(name))))


def _spec_of(field: Field, recorded: TensorSpec | None) -> TensorSpec:
    """Return the recorded spec in the type and shape of the field; an Unbounded if there is none that fits."""
    dtype: torch.dtype = getattr(torch, field.dtype)
    anything = Unbounded(field.shape, dtype=dtype)
    if recorded is None or isinstance(recorded, NonTensor) or recorded.shape.numel() != anything.shape.numel():
        return anything
    try:
        spec = recorded.reshape(field.shape).to(dtype)
    except (SchemaError, UsageError):  # such as bounds that the type cannot hold
        return anything
    return _without_infinite_bounds(spec)


def spec_of_space(space: Mapping[str, Any]) -> TensorSpec:
    """Return the spec of a space that a source has recorded. Parts without a finite bound become Unbounded.

    FormatError for a space that has no spec.
    """
    return _without_infinite_bounds(spec_from_space(space))


def _without_infinite_bounds(spec: TensorSpec) -> TensorSpec:
    """Replace a Bounded without a finite bound by an Unbounded, also inside of a Composite."""
    if isinstance(spec, Composite):
        for name, child in list(spec.items()):
            if child is not None:
                spec.set(name, _without_infinite_bounds(child))
    elif isinstance(spec, BoundedContinuous) and bool((spec.space.low.isneginf() & spec.space.high.isposinf()).all()):
        return Unbounded(spec.shape, spec.device, spec.dtype)
    return spec
