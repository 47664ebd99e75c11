"""What can be done to rows without writing Python: operations by name, and programs of them."""

from .base import BoundOperation, EpisodeChoice, FieldChanges, Operation, RowOperation
from .columns import Fields, LazyColumn

__all__ = ["BoundOperation", "EpisodeChoice", "FieldChanges", "Fields", "LazyColumn", "Operation", "RowOperation"]
