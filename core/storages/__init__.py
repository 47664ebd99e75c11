"""Storages: where rows live. The lowest part of core that imports torch."""

from .base import Storage, require_like

__all__ = ["Storage", "require_like"]
