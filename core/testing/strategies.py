"""Hypothesis strategies for datasets."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from .datasets import ODD_LEAVES, DatasetPlan, Ending, Leaf, Presence

__all__ = ["dataset_plans"]


@st.composite
def dataset_plans(draw: st.DrawFn, max_episodes: int = 5, max_length: int = 6) -> DatasetPlan:
    """Plans of a few ragged episodes, down to none at all, with some of the odd leaves."""
    lengths = tuple(draw(st.lists(st.integers(1, max_length), max_size=max_episodes)))
    endings = tuple(draw(st.sampled_from(get_args(Ending))) for _ in lengths)
    leaves = tuple(draw(st.lists(st.sampled_from(ODD_LEAVES), unique=True, max_size=8)))
    presence: st.SearchStrategy[Presence] = st.sampled_from(get_args(Presence))
    return DatasetPlan(
        lengths=lengths,
        endings=endings,
        jumps=tuple(draw(st.booleans()) for _ in lengths),
        leaves=leaves,
        root_flags=draw(presence),
        root_reward="absent" if _names_reward(leaves) else draw(presence),
        text=draw(st.booleans()),
        documents=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def _names_reward(leaves: tuple[Leaf, ...]) -> bool:
    """Tell whether `reward` is a folder at the root, where it cannot be a leaf too."""
    return any(leaf.key[0] == "reward" for leaf in leaves)
