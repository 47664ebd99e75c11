"""Template methods: what a contract does around the methods that a subclass implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import UsageError


class FinalMethodError(UsageError, TypeError):
    """A subclass overrides a method that the contract keeps for itself."""


def own_attributes(cls: type, contract: type) -> dict[str, Any]:
    """Return what `cls` adds to the classes of the contract that it derives from: its own body, and plain mixins."""
    inherited = {parent for base in cls.__bases__ if issubclass(base, contract) for parent in base.__mro__}
    own: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        if parent not in inherited:
            own |= vars(parent)
    return own


def refuse_overrides(cls: type, own: Mapping[str, Any], finals: Mapping[str, str]) -> None:
    """Raise FinalMethodError (a TypeError) if a class overrides one of `finals`; those name what to implement."""
    for name, instead in finals.items():
        if name in own:
            raise FinalMethodError(
                f"{cls.__name__} overrides {name}(), which does the book-keeping and is final",
                hint=f"implement {instead}",
            )


def delegate(cls: type, name: str) -> None:
    """Let `cls` have a method `name` that calls the next one in the method resolution order.

    For an abstract method that a class has no use for, because it overrides the public method that calls it. A class
    that derives from this one and from one that implements the method still reaches the implementation.
    """

    def passed_on(self: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(super(cls, self), name)(*arguments, **options)

    passed_on.__name__ = name
    setattr(cls, name, passed_on)
