"""Hooks that change how the episodes of a tensordict lie: flat, ragged, or one entry an episode, and back."""

from .flat import Flat2TED, TED2Flat
from .h5 import H5Combine, H5Split
from .nested import Nested2TED, TED2Nested

__all__ = ["Flat2TED", "H5Combine", "H5Split", "Nested2TED", "TED2Flat", "TED2Nested"]
