"""Fetching files over the network: resumed, retried, verified. Independent of formats."""

from .http import HttpSource

__all__ = ["HttpSource"]
