"""The bar that scripts ask for shows names of data without letting them steer the terminal."""

from __future__ import annotations

import pytest

from rbtool.core.datasets.buffer import ProgressBar


def test_no_name_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar.start("reading \x9b2J", 2, "steps")
    bar.advance(2)
    bar.note("left out: a\x1b[31m\u202eb")
    bar.done("\x1b[2J")
    shown = capsys.readouterr().err
    assert r"left out: a\x1b[31m\u202eb" in shown
    assert not any(sign in shown for sign in ("\x9b", "\u202e", "\x1b[2J"))
