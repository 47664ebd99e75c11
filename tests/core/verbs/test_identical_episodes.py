"""`identical_episodes`: what is read of a dataset, and that progress covers all of it."""

from __future__ import annotations

import pytest

from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.split import identical_episodes


@pytest.mark.parametrize("lengths", [[2, 3], [2, 2, 3]])
def test_progress_reaches_the_end(tmp_path, lengths):
    write_walks(tmp_path / "walks", [(length, "open") for length in lengths])
    seen: list[int] = []
    with open_steps(tmp_path / "walks") as reader:
        assert identical_episodes(reader, seen.append).tolist() == list(range(len(lengths)))
    assert sum(seen) == sum(lengths)
