"""Errors of the specs that also inherit from a further built-in error."""

from __future__ import annotations

from ..errors import SchemaError, UsageError

__all__ = ["LockedSpecError", "NotInSpecError", "SpecTypeError", "UndefinedForSpecError"]


class LockedSpecError(UsageError, RuntimeError):
    """A change of a locked Composite."""


class NotInSpecError(SchemaError, AssertionError):
    """A value is not a member of the spec it is checked against."""


class SpecTypeError(SchemaError, TypeError):
    """A value, or an argument, is of another type than the spec can take."""


class UndefinedForSpecError(UsageError, NotImplementedError):
    """An operation that this kind of spec does not define, such as counting real numbers."""
