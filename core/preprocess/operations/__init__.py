"""What can be done to rows without writing Python: operations by name, and programs of them."""

from .base import BoundOperation, EpisodeChoice, FieldChanges, Fields, LazyColumn, Operation, RowOperation

__all__ = ["BoundOperation", "EpisodeChoice", "FieldChanges", "Fields", "LazyColumn", "Operation", "RowOperation"]
