"""What errors say beyond their sentence: the nearest name, the hint, in tracebacks too, and misspelt arguments."""

from __future__ import annotations

import copy
import pickle
import traceback

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper

from rbtool.core.errors import (
    FormatError,
    MissingKeyError,
    RbtoolError,
    UsageError,
    as_int,
    did_you_mean,
    require_seed,
    require_share,
)

NAMES = ["action", "observation.image", "next.reward", "observation.position"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("acton", "action"), ("ACTION", "action"), ("rewrd", "next.reward"), ("image", "observation.image"),
        ("act", "action"), ("info.imgae", "observation.image"), ("next.rewrd", "next.reward"),
    ],
)  # fmt: skip
def test_the_nearest_name(typed: str, meant: str) -> None:
    assert did_you_mean(typed, NAMES) == f"; did you mean {meant!r}?"


@pytest.mark.parametrize("typed", ["zzz", ""])
def test_no_name_is_offered_that_is_far_away(typed: str) -> None:
    assert did_you_mean(typed, NAMES) == ""


def _shown(error: RbtoolError) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()[-2:]


@pytest.mark.parametrize("kind", [UsageError, MissingKeyError])
def test_a_traceback_ends_with_the_hint(kind: type[RbtoolError]) -> None:
    error = kind("no field", hint="take another")
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert [line.rpartition(": ")[2] for line in _shown(one)] == ["no field", "take another"]
        assert one.__notes__ == ["hint: take another"]


@pytest.mark.parametrize("hint", ["take another", "one of\n  a = 1\n\n  b = 2", ""])
@pytest.mark.parametrize("kind", [UsageError, MissingKeyError])
def test_an_error_from_a_loader_worker_keeps_its_hint(kind: type[RbtoolError], hint: str) -> None:
    try:
        error = kind("no field", hint=hint)
        error.add_note("of somebody else")
        raise error
    except RbtoolError:
        in_worker = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(kind) as caught:
        in_worker.reraise()
    assert (caught.value.message, caught.value.hint) == ("no field", hint)


def test_a_hint_that_is_given_later_takes_the_place_of_the_first() -> None:
    error = UsageError("no field", hint="take another")
    error.add_note("of somebody else")
    error.hint = "take none"
    assert error.__notes__ == ["of somebody else", "hint: take none"]
    error.hint = ""
    assert (error.__notes__, error.hint) == (["of somebody else"], "")


def test_without_a_hint_there_is_no_note() -> None:
    assert not hasattr(UsageError("no field"), "__notes__")


def test_a_message_is_one_line_whatever_is_named_in_it() -> None:
    assert RbtoolError("dis\ncount\u2028 is missing").message == "dis\\ncount\\u2028 is missing"


def test_control_characters_of_names_are_escaped() -> None:
    error = FormatError("a.h5 has the key 'a\n\x1b[31mb', é is fine")
    assert str(error) == error.message == r"a.h5 has the key 'a\n\x1b[31mb', é is fine"
    assert pickle.loads(pickle.dumps(error)).message == error.message


def test_shares_are_numbers_of_any_kind() -> None:
    assert [type(require_share("it", value)) for value in (0, 0.5, np.float32(1), np.float64(1))] == [float] * 4
    for other in (True, np.True_, "0.5", None, 1.5, -0.1, float("nan")):
        with pytest.raises(UsageError):
            require_share("it", other)


def test_seeds_are_unsigned_integers_of_python_or_numpy() -> None:
    assert [require_seed(seed) for seed in (0, np.int64(7), (1 << 64) - 1)] == [0, 7, (1 << 64) - 1]
    for seed in (-1, 1 << 64, 1.5, "1", None):
        with pytest.raises(ValueError, match="expected an unsigned 64-bit number"):
            require_seed(seed)


def test_integers_of_other_libraries_are_ints() -> None:
    found = [as_int(value) for value in (3, np.int32(3), torch.tensor(3))]
    assert (found, list(map(type, found))) == ([3] * 3, [int] * 3)
    for other in (True, 3.0, "3", None, np.float64(3)):
        assert as_int(other) is other
