"""Which rows are chosen."""

from .base import Index, Sampler
from .boundaries import find_start_stop_traj
from .prioritized import PrioritizedSampler
from .prioritized_slices import PrioritizedSliceSampler
from .slices import SliceSampler
from .slices_without_replacement import SliceSamplerWithoutReplacement
from .uniform import RandomSampler, SamplerWithoutReplacement

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
