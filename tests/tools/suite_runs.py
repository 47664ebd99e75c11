"""Runs the tests of a contract suite of `rbtool.core.testing` by name, to see which of them fail."""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Cases:
    """Collects the cases that a suite asks pytest for."""

    def __init__(self) -> None:
        self.fixturenames = ("case",)
        self.cases: list[Any] = []

    def parametrize(self, name: str, cases: list[Any], ids: Any = None) -> None:
        assert name == "case"
        self.cases = cases


def names_in(suite: type) -> list[str]:
    return [name for name in dir(suite) if name.startswith("test_")]


def failure(suite: type, name: str) -> BaseException | None:
    """Run one test with every case that it has; return the first error, or None."""
    for options in _calls(suite, name):
        try:
            getattr(suite(), name)(**options)
        except Exception as error:
            return error
    return None


def failures(suite: type) -> dict[str, BaseException]:
    """Run all tests of a suite; return the errors of those that fail, by name."""
    found = {name: failure(suite, name) for name in names_in(suite)}
    return {name: error for name, error in found.items() if error is not None}


def _calls(suite: type, name: str) -> Iterator[dict[str, Any]]:
    wanted = inspect.signature(getattr(suite, name)).parameters
    cases: list[dict[str, Any]] = [{}]
    if "case" in wanted:
        collected = Cases()
        suite().pytest_generate_tests(collected)
        cases = [{"case": case} for case in collected.cases]
    for options in cases:
        if "tmp_path" not in wanted:
            yield options
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield options | {"tmp_path": Path(folder)}


class Broken(NamedTuple):
    """A class that breaks a rule: its parent, the tests that have to fail, and the members that break the rule."""

    parent: type
    tests: str
    members: Mapping[str, Any]

    def require_found(self, suite_of: Callable[[type], type], module: str) -> None:
        """Run the tests, whose names are separated by blanks: they fail for the class, and pass without its members."""
        for members in ({}, self.members):
            kind = type("Saboteur", (self.parent,), {"__module__": module, **members})
            setattr(sys.modules[module], kind.__name__, kind)  # where pickle looks for it
            for test in self.tests.split():
                error = failure(suite_of(kind), test)
                assert (error is None) is (members != self.members), (test, members, error)
