"""The few hot loops, compiled by numba where it is installed, each with a plain twin that does the same without."""

from .rows import CompiledRows, PlainRows, fastest_rows

__all__ = ["CompiledRows", "PlainRows", "fastest_rows"]
