"""Many small cases in one test: pytest takes longer for a test than most of them do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with every case, as `pytest.mark.parametrize` does, but in one test; a failure names its case.

    The first case that fails ends the test. All have the same fixtures, but for a `tmp_path` of their own.
    """
    listed = [dict(zip(names, case, strict=True)) if isinstance(names, tuple) else {names: case} for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*instance: Any, **fixtures: Any) -> None:
            folder = fixtures.get("tmp_path")
            for number, case in enumerate(listed):
                if folder is not None:
                    fixtures["tmp_path"] = folder / str(number)
                    fixtures["tmp_path"].mkdir()
                try:
                    test(*instance, **case, **fixtures)
                except BaseException as error:
                    error.add_note(f"with {case}")
                    raise

        signature = inspect.signature(test)
        left = [one for name, one in signature.parameters.items() if name not in listed[0]]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate


def in_loops(suite: Any) -> Any:
    """Have each test of a suite whose tests take a `case` go through all of them."""
    for name in dir(suite):
        if name.startswith("test_") and "case" in inspect.signature(getattr(suite, name)).parameters:
            setattr(suite, name, each("case", suite.cases())(getattr(suite, name)))
    return suite


def suite_of(suite: type, **makers: Callable[[], Any]) -> type:
    """Make a suite in which each test of a contract runs with the results of several `make` functions, by name."""
    suites = {name: type(name, (suite,), {"make": staticmethod(make)}) for name, make in makers.items()}

    def looped(test: str) -> Callable[..., None]:
        return each("kind", suites)(lambda self, kind: getattr(suites[kind](), test)())

    return type(suite.__name__, (), {name: looped(name) for name in dir(suite) if name.startswith("test_")})
