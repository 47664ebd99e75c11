"""Base of the contracts whose public methods are final: what one implements are the hooks that they call."""

from __future__ import annotations

from typing import Any

__all__ = ["Template"]


class Template:
    """Refuses subclasses that override a method marked `typing.final`: TypeError when the class is defined."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        for name in vars(cls):
            if any(_is_final(vars(base).get(name)) for base in cls.__mro__[1:]):
                base = next(base for base in cls.__mro__[1:] if _is_final(vars(base).get(name)))
                raise TypeError(
                    f"{cls.__name__}.{name} overrides a final method of {base.__name__}, whose documentation lists "
                    "the methods to implement"
                )


def _is_final(value: object) -> bool:
    return bool(getattr(value, "__final__", False))
