"""The words for kinds of actions."""

from __future__ import annotations

import rbtool
from rbtool.core.specs.categorical import ACTION_SPACE_MAP


def test_each_kind_and_each_spelling_has_one_word() -> None:
    spec = rbtool.MultiCategorical([2, 3])
    spellings = ("multi_categorical", "multi-categorical", "multi_discrete", "multi-discrete")
    assert {ACTION_SPACE_MAP[word] for word in (*spellings, type(spec))} == {"multi_categorical"}
    assert ACTION_SPACE_MAP["multi-one-hot"] == ACTION_SPACE_MAP[rbtool.MultiOneHot] == "mult_one_hot"


def test_the_sets_of_values_are_public() -> None:
    assert isinstance(rbtool.Bounded(0, 1, (2,)).space, rbtool.ContinuousBox)
    assert rbtool.MultiCategorical([2, 3]).space == rbtool.BoxList((rbtool.CategoricalBox(2), rbtool.CategoricalBox(3)))
    assert isinstance(rbtool.Binary(2).space, rbtool.Box)
    assert rbtool.Binary(2).space == rbtool.BinaryBox(2)
