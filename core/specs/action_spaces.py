"""The words for the kinds of discrete actions, as policies and losses name them."""

from __future__ import annotations

from .base import TensorSpec
from .categorical import Binary, Categorical
from .multi_categorical import MultiCategorical
from .one_hot import MultiOneHot, OneHot

_WORDS: dict[str, tuple[str, ...]] = {
    "one_hot": (),
    "mult_one_hot": ("multi_one_hot",),
    "binary": (),
    "categorical": (),
    "multi_categorical": ("multi_discrete",),
}

ACTION_SPACE_MAP: dict[type[TensorSpec] | str, str] = {
    OneHot: "one_hot",
    MultiOneHot: "mult_one_hot",
    Binary: "binary",
    Categorical: "categorical",
    MultiCategorical: "multi_categorical",
    **{
        spelled: word
        for word, others in _WORDS.items()
        for known in (word, *others)
        for spelled in (known, known.replace("_", "-"))
    },
}
"""Maps classes of specs and the spellings of their words to one word; words and spellings are those of TorchRL."""
