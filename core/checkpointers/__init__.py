"""Checkpointers save and load storages; importing this package registers the default one of each class of storages."""

from . import ensemble, episodes, lists, references, tensor  # noqa: F401  # registers them
