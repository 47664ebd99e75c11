"""Errors of the specs that also have to be a built-in error which none of the package's own inherits."""

from __future__ import annotations

from ..errors import SchemaError, UsageError

__all__ = ["LockedSpecError", "NotInSpecError", "SpecTypeError", "UndefinedForSpecError"]


class LockedSpecError(UsageError, RuntimeError):
    """A locked Composite was to be changed."""


class NotInSpecError(SchemaError, AssertionError):
    """A value is not a member of the spec it was held against."""


class SpecTypeError(SchemaError, TypeError):
    """A value, or an argument, is of another type than the spec can take."""


class UndefinedForSpecError(UsageError, NotImplementedError):
    """The question has no answer for this kind of spec, such as how many real numbers there are."""
