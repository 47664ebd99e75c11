"""The TED format: keys, rows, and the ends of episodes. Needs numpy only."""

from .episodes import rows_equal
from .schema import Field, Key

__all__ = ["Field", "Key", "rows_equal"]
