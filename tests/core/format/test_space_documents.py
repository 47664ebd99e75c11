"""Documents of spaces that others wrote are read by one schema."""

from __future__ import annotations

from typing import Any

import pytest

from rbtool.core.errors import FormatError
from rbtool.core.format.manifest import is_space, require_space

BOX = {"type": "Box", "dtype": "float32", "shape": [2], "low": [0, 0], "high": [1, 1]}


def test_a_box_is_a_space() -> None:
    require_space(BOX, "a file")
    assert is_space(BOX)


@pytest.mark.parametrize(
    "entries",
    [
        {"low": "abc"},
        {"high": ["0", "one"]},
        {"low": [[0], [0, 1]]},
        {"low": [0, 0, 0]},
        {"low": {"0": 0}},
        {"shape": "2"},
        {"shape": [-2]},
        {"shape": [1 << 62, 1 << 62]},
        {"dtype": 3},
        {"type": ["Box"]},
        {"type": "Discrete", "n": "four"},
        {"type": "MultiDiscrete", "nvec": [1, "2"]},
        {"type": "Dict", "subspaces": [BOX]},
        {"type": "Tuple", "subspaces": [{**BOX, "low": "abc"}]},
    ],
)
def test_entries_of_another_type_are_format_errors_that_name_the_file(entries: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="a file"):
        require_space({**BOX, **entries}, "a file")
    assert not is_space({**BOX, **entries})
