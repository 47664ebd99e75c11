"""Which rows are chosen."""

from .base import Index, Sampler
from .random import RandomSampler

__all__ = ["Index", "RandomSampler", "Sampler"]
