"""Calls a user's function, with what it prints, raises or forks kept from doing harm."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch

from .failures import FunctionFailed
from .seeds import borrowed_generators

__all__ = ["UserFunction"]


class UserFunction:
    """A loaded function. `label` is how people name it."""

    def __init__(self, label: str, function: Callable[[Any], Any]) -> None:
        self.label = label
        self._function = function

    def vmapped(self) -> Self:
        """Return the function of many rows that calls this one of single rows once; each row draws its own numbers."""
        return type(self)(self.label, torch.vmap(self._function, randomness="different"))

    def __call__(self, argument: Any, steps: tuple[int, int]) -> Any:
        """Call it inside `running`; FunctionFailed, with the steps, for whatever it raises but an interruption."""
        process = os.getpid()
        try:
            return self._function(argument)
        except (Exception, SystemExit) as error:
            raise FunctionFailed.of(error, steps) from error
        finally:
            if os.getpid() != process:
                os._exit(0)  # it forked: the child must not go on with the job as if it were this process

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let what it prints go to stderr, and put the global random generators back afterwards."""
        with borrowed_generators(), contextlib.redirect_stdout(sys.stderr):
            yield
