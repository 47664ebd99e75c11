"""TorchRL's own layouts of whole episodes: what it wrote is read, and what it can read is written."""

from .exchange import is_compatible, load_compatible, open_compatible, save_compatible

__all__ = ["is_compatible", "load_compatible", "open_compatible", "save_compatible"]
