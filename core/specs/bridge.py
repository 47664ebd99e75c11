"""Interoperability with TorchRL's specs: each library accepts the specs of the other without a conversion by the user.

rbtool never imports TorchRL. When a program does, before or after it loads our specs, `watch` connects the classes of
the same name:

- **isinstance.** TorchRL's specs are abstract base classes: ours are registered with them. For tests against our
  classes, `Counterpart` has a `__subclasshook__`. TorchRL's boxes are plain classes, so each becomes the last base of
  our box. No object changes its type, and the order of imports does not matter.
- **Our specs in TorchRL** stay ours. Environments, modules and losses call their public methods. TorchRL's Composite
  also calls a few private methods, which `TensorSpec` and `Composite` implement for it.
- **TorchRL's specs in rbtool** are converted to ours by `as_own` wherever a spec is an argument: entries, stacks,
  comparisons.
- **Tables.** Our classes are added to TorchRL's `ACTION_SPACE_MAP`. Its `torch.stack` and its `==` call ours if one of
  the specs is ours.

Two alternatives were rejected. If our names became TorchRL's classes once it is imported, types would depend on the
order of imports, and the additional features of our specs would be lost. If users had to convert specs between the
libraries, each program would need such code. `to_torchrl` remains for code that uses more of a spec than TorchRL
itself does.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, ABCMeta
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..torchrl_classes import PEER, join, when_imported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAMES = (
    "Binary", "Bounded", "BoundedContinuous", "BoundedDiscrete", "Categorical", "Choice", "Composite",
    "MultiCategorical", "MultiOneHot", "NonTensor", "OneHot", "Stacked", "StackedComposite", "TensorSpec", "Unbounded",
    "UnboundedContinuous", "UnboundedDiscrete",
    "Box", "BinaryBox", "BoxList", "CategoricalBox", "ContinuousBox",
)  # fmt: skip
"""The classes that both libraries have; bases come before the boxes that derive from them."""

_peers: dict[type, type] = {}
"""TorchRL's class for each of ours; empty until TorchRL is imported."""


class Counterpart(ABC):  # noqa: B024  # subclasses define the abstract methods
    """The base of classes that TorchRL has under the same name: instances of its class count as instances of ours."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return _peers.get(cls) in other.__mro__ or NotImplemented


def is_own(spec: object) -> bool:
    """Return whether an object is of one of our classes; `isinstance` also accepts TorchRL's classes."""
    return Counterpart in type(spec).__mro__


def as_own(spec: Any) -> Any:
    """Convert a spec of TorchRL to ours; anything else is returned unchanged."""
    kinds = type(spec).__mro__ if _peers else ()
    if Counterpart in kinds or not any(kind.__name__ in _KINDS and kind in _peers.values() for kind in kinds):
        return spec
    return _converted(spec, {kind.__name__: kind for kind in _peers})


def to_torchrl(spec: Any) -> Any:
    """Convert a spec of ours to TorchRL's; ImportError if the program has not imported TorchRL."""
    if not _peers:
        raise ImportError(f"there are no specs of TorchRL to convert to: {PEER} is not imported")
    return _converted(spec, {kind.__name__: peer for kind, peer in _peers.items()})


def _converted(spec: Any, classes: Mapping[str, Any]) -> Any:
    """Convert a spec to the class of the same name in `classes`, by the arguments that both libraries have."""
    name = next(kind.__name__ for kind in type(spec).__mro__ if kind.__name__ in _KINDS)
    kind, again = classes[name], functools.partial(_converted, classes=classes)
    found: dict[str, Any] = {"shape": spec.shape, "device": spec.device}
    match name:
        case "Composite":
            entries = {key: None if entry is None else again(entry) for key, entry in spec.items()}
            found |= {"data_cls": spec.data_cls, "step_mdp_static": spec.step_mdp_static}
            return kind(entries, names=spec.names if any(spec.names) else None, **found)
        case "Stacked" | "StackedComposite":
            return kind(*map(again, spec.unbind(spec.stack_dim)), dim=spec.stack_dim)
        case "Choice":
            return kind([again(choice) for choice in spec._choices])
        case "Bounded":
            known = tuple(slice(1 if size == -1 else None) for size in spec.shape)
            found |= {"low": spec.low[known], "high": spec.high[known], "domain": spec.domain}
        case "OneHot":
            found |= {"n": spec.space.n, "mask": spec.mask, "use_register": spec.use_register}
        case "MultiOneHot":
            found |= {"nvec": [box.n for box in spec.space], "mask": spec.mask, "use_register": spec.use_register}
        case "Categorical":
            found |= {"n": spec.space.n, "mask": spec.mask}
        case "MultiCategorical":
            found |= {"nvec": spec.nvec, "mask": spec.mask, "remove_singleton": spec.remove_singleton}
        case "NonTensor":
            found |= {"example_data": spec.example_data}
            # In TorchRL, `batched` only means that no dimension belongs to the datum. In ours, it also means that there
            # is a datum for each element.
            features = {"feature_dims": min(spec.feature_dims, len(spec.shape))}
            found |= {"batched": True} if spec.batched and is_own(spec) else features
    return kind(dtype=spec.dtype, **found)


_KINDS = (
    "Binary", "Bounded", "Categorical", "Choice", "Composite", "MultiCategorical", "MultiOneHot", "NonTensor", "OneHot",
    "Stacked", "StackedComposite", "Unbounded",
)  # fmt: skip


def watch(own_names: Callable[[], Mapping[str, Any]]) -> None:
    """Connect our specs with TorchRL's, now or as soon as TorchRL is imported.

    `own_names` returns the names that our modules of specs define. It is a function because these modules import this
    one, which therefore cannot import them.
    """
    when_imported(lambda: _connect(own_names()))


def _connect(own: Mapping[str, Any]) -> None:
    """Connect the classes of the two libraries, as far as this version of TorchRL has them."""
    theirs, utils = (sys.modules.get(f"{PEER}.{name}") for name in ("tensor_specs", "utils"))
    pairs: dict[type, Any] = {own[name]: getattr(theirs, name) for name in _NAMES if hasattr(theirs, name)}
    for ours, peer in pairs.items():
        join(ours, peer)
        if isinstance(peer, ABCMeta) and "__eq__" in vars(peer):
            peer.__eq__ = _unless_ours(vars(peer)["__eq__"])  # type: ignore[method-assign, assignment]
    _peers.update(pairs)  # last: two classes cannot be registered if each is a subclass of the other already

    words = {kind: word for kind, word in own["ACTION_SPACE_MAP"].items() if isinstance(kind, type)}
    getattr(utils, "ACTION_SPACE_MAP", {}).update(words)
    functions = getattr(pairs.get(own["TensorSpec"]), "SPEC_HANDLED_FUNCTIONS", {})
    if torch.stack in functions:
        functions[torch.stack] = _stack_of(own["FUNCTIONS"][torch.stack], functions[torch.stack])


def _unless_ours(equal: Callable[[Any, object], bool]) -> Callable[[Any, object], bool]:
    """Wrap TorchRL's `__eq__`, which only supports its own classes, so that Python tries ours for a spec of ours."""

    @functools.wraps(equal)
    def __eq__(self: Any, other: object) -> bool:
        return NotImplemented if is_own(other) else equal(self, other)

    return __eq__


def _stack_of(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def stack(specs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return (ours if any(map(is_own, specs)) else theirs)(specs, *args, **kwargs)

    return stack
