"""Which rows are chosen."""

from .base import Index, Sampler
from .boundaries import find_start_stop_traj
from .prioritized import PrioritizedSampler
from .prioritized_slices import PrioritizedSliceSampler
from .random import RandomSampler
from .slices import SliceSampler
from .slices_without_replacement import SliceSamplerWithoutReplacement
from .without_replacement import SamplerWithoutReplacement

__all__ = [
    "Index",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "find_start_stop_traj",
]
