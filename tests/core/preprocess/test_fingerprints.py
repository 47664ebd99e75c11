from __future__ import annotations

import functools
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.preprocess.fingerprints import fingerprint_of

FACTOR = 2


def helper(x: Any) -> Any:
    return x * FACTOR


def made(offset: Any = 1) -> Any:
    return lambda x: helper(x) + offset


@dataclass
class Scale:
    by: Any = 1.0
    done: list[Any] = field(default_factory=list)

    def __call__(self, x: Any) -> Any:
        return x * self.by

    def method(self, x: Any) -> Any:
        return x / self.by


def kind_of(offset: int, base: type = object) -> type:
    """A class whose methods, and those of its objects, depend on what is around it."""

    class Kind(base):
        def helper(self, x: int) -> int:
            return x + offset

        def __call__(self, x: int) -> int:
            return self.helper(x)

    return Kind


def kind_with(**body: Any) -> type:
    return type("Kind", (), {"__module__": __name__, **body})


def circle() -> Any:
    around: list[Any] = []
    around.append(around)
    return lambda x: around


ALIKE = [
    lambda: made(),
    lambda: made(2.5),
    lambda: made([1, {"a": (2, None)}]),
    lambda: made({"b", "a", "cc"}),
    lambda: made(np.arange(6).reshape(2, 3)),
    lambda: made(np.arange(12).reshape(2, 6)[:, ::2]),
    lambda: made(torch.arange(6.0)),
    lambda: made(torch.arange(6.0)[2:]),
    lambda: made(torch.nn.Linear(1, 1).requires_grad_(False).apply(lambda m: m.weight.fill_(1) and m.bias.fill_(2))),
    lambda: functools.partial(helper, y=3),
    lambda: functools.partial(helper, y=4),
    lambda: Scale(3.0),
    lambda: Scale(4.0),
    lambda: Scale(3.0).method,
    lambda: Scale(4.0).method,
    lambda: helper,
    lambda: made,
    lambda: np.sqrt,
    lambda: len,
    lambda: Scale,
    lambda: kind_of(1),
    lambda: kind_of(2),
    lambda: kind_of(1)(),
    lambda: kind_of(2)(),
    lambda: kind_of(2)().helper,
    lambda: kind_of(1, kind_of(3)),
    lambda: kind_of(1, kind_of(4)),
    lambda: kind_of(1, torch.nn.Module),
    lambda: made(kind_of(5)),
    lambda: functools.partial(kind_of(1), y=3),
    lambda: kind_with(key="a"),
    lambda: kind_with(key="b"),
    lambda: kind_with(key=property(lambda self: 1)),
    lambda: kind_with(key=property(lambda self: 2)),
    lambda: kind_with(key=staticmethod(lambda: 1)),
    lambda: kind_with(key=staticmethod(lambda: 2)),
    lambda: kind_with(key=classmethod(lambda cls: 1)),
    lambda: lambda x, y=1: x,
    lambda: lambda x, y=2: x,
    lambda: lambda x: x + 1,
    lambda: lambda x: x + 2,
    lambda: lambda x: x.a,
    lambda: lambda x: x.b,
]


def test_equal_functions_are_equal_and_others_are_not() -> None:
    one, again = ([fingerprint_of(make()) for make in ALIKE] for _ in range(2))
    assert one == again
    assert len(set(one)) == len(one)


def test_what_a_function_finds_around_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_of(made())
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert fingerprint_of(made()) != before


def test_classes_of_installed_packages_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_of(kind_of(1, torch.nn.Linear))
    monkeypatch.setattr(torch.nn.Linear, "forward", helper)
    assert fingerprint_of(kind_of(1, torch.nn.Linear)) == before


def test_circles_and_things_that_cannot_be_seen_into_do_no_harm() -> None:
    assert fingerprint_of(circle()) == fingerprint_of(circle())
    assert fingerprint_of(made(threading.Lock())) == fingerprint_of(made(threading.Lock()))


def test_nothing_is_run() -> None:
    class Loud:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        __repr__ = __call__ = __eq__ = __hash__ = __iter__ = __len__ = __reduce__ = __getattr__  # type: ignore[assignment]

    assert len(fingerprint_of(made(Loud()))) == len(fingerprint_of(Loud())) == 64


def test_other_processes_say_the_same() -> None:
    code = (
        "from rbtool.core.preprocess.fingerprints import fingerprint_of\n"
        "names = {'north', 'south', 'east', 'west'}\n"
        "def f(x, y=frozenset('abcdef')):\n    return x in {'k', 'l', 'm', 'n'} and names\n"
        "import dataclasses, enum, torch, tensordict\n"
        "class Colour(enum.Enum):\n    RED = 1\n"
        "class Rows(tensordict.TensorClass):\n    entry: torch.Tensor\n    def paint(self):\n        return Colour\n"
        "@dataclasses.dataclass\nclass Both:\n    x: int = 1\n    names = names\n    def __call__(self):\n"
        "        return Rows\n"
        "before = [fingerprint_of(one) for one in (f, Both, Both(), Rows)]\n"
        "Rows(entry=torch.zeros(2), batch_size=[2]).clone().paint()\n"
        "assert before == [fingerprint_of(one) for one in (f, Both, Both(), Rows)]\n"
        "print(before)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
