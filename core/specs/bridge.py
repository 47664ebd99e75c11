"""TorchRL's specs beside ours: each library takes the specs of the other as they are, and nobody converts.

rbtool never imports TorchRL. When a program does, before or after it loads our specs, `watch` introduces the classes of
the same name to each other:

- **isinstance.** TorchRL's specs are abstract base classes, with which ours are registered; `Counterpart` answers what
  is asked of ours. Its boxes are plain classes, so each becomes the last base of our box. No object changes its type,
  and nothing depends on which library was imported first.
- **Our specs in TorchRL** stay ours. Environments, modules and losses call their public methods, and the Composite of
  TorchRL calls a few private ones, which `TensorSpec` and `Composite` have for it.
- **TorchRL's specs in rbtool** are made again as ours, by `as_own`, wherever we take a spec: as entries, in stacks, in
  comparisons.
- **Tables.** Our classes get their names in TorchRL's `ACTION_SPACE_MAP`. Its `torch.stack` and its `==` leave the work
  to ours if one of the specs is ours.

Two other ways were tried. If our names stood for TorchRL's classes once it is imported, types would depend on the order
of imports, and what our specs do better would be lost. Conversions at the borders are for users to write; `to_torchrl`
is there for code that looks deeper into a spec than TorchRL itself does.
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


class Counterpart(ABC):  # noqa: B024  # what is abstract is for those who derive from it
    """The base of classes that TorchRL has under the same name: instances of its class count as instances of ours."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return _peers.get(cls) in other.__mro__ or NotImplemented


def is_own(spec: object) -> bool:
    """Return whether an object is of one of our classes, which `isinstance` does not tell from TorchRL's."""
    return Counterpart in type(spec).__mro__


def as_own(spec: Any) -> Any:
    """Return a spec of TorchRL as the same spec of ours, and anything else unchanged."""
    kinds = type(spec).__mro__ if _peers else ()
    if Counterpart in kinds or not any(kind.__name__ in _KINDS and kind in _peers.values() for kind in kinds):
        return spec
    return _remade(spec, {kind.__name__: kind for kind in _peers})


def to_torchrl(spec: Any) -> Any:
    """Return a spec of ours as the same spec of TorchRL; ImportError if the program has not imported it."""
    if not _peers:
        raise ImportError(f"there are no specs of TorchRL to convert to: {PEER} is not imported")
    return _remade(spec, {kind.__name__: peer for kind, peer in _peers.items()})


def _remade(spec: Any, classes: Mapping[str, Any]) -> Any:
    """Make a spec again as the class of its name among `classes`, by the arguments that both libraries have."""
    name = next(kind.__name__ for kind in type(spec).__mro__ if kind.__name__ in _KINDS)
    kind, again = classes[name], functools.partial(_remade, classes=classes)
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
            # TorchRL calls batched what has no dimensions of features; ours then has a datum for each element.
            features = {"feature_dims": min(spec.feature_dims, len(spec.shape))}
            found |= {"batched": True} if spec.batched and is_own(spec) else features
    return kind(dtype=spec.dtype, **found)


_KINDS = (
    "Binary", "Bounded", "Categorical", "Choice", "Composite", "MultiCategorical", "MultiOneHot", "NonTensor", "OneHot",
    "Stacked", "StackedComposite", "Unbounded",
)  # fmt: skip


def watch(own_names: Callable[[], Mapping[str, Any]]) -> None:
    """Connect our specs with TorchRL's, now or as soon as TorchRL is imported.

    `own_names` returns what our modules of specs define; they import this one, which therefore does not import them.
    """
    when_imported(lambda: _connect(own_names()))


def _connect(own: Mapping[str, Any]) -> None:
    """Introduce the classes of the two libraries to each other, as far as this version of TorchRL has them."""
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
    """Let Python ask our spec whether it equals one of TorchRL's, which only knows its own classes."""

    @functools.wraps(equal)
    def __eq__(self: Any, other: object) -> bool:
        return NotImplemented if is_own(other) else equal(self, other)

    return __eq__


def _stack_of(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def stack(specs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return (ours if any(map(is_own, specs)) else theirs)(specs, *args, **kwargs)

    return stack
