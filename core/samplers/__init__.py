"""Which rows are chosen."""

from .base import Index, Sampler
from .random import RandomSampler
from .without_replacement import SamplerWithoutReplacement

__all__ = ["Index", "RandomSampler", "Sampler", "SamplerWithoutReplacement"]
