"""Where rows live. torch begins here."""

from .base import Storage, require_like

__all__ = ["Storage", "require_like"]
