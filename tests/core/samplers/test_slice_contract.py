"""Every slice sampler keeps the contract."""

from __future__ import annotations

from typing import Any

from rbtool.core.samplers.prioritized import PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.testing.slice_samplers import SliceSamplerTests


class TestSliceSampler(SliceSamplerTests):
    def make(self, **options: Any) -> SliceSampler:
        return SliceSampler(**options)


class TestSliceSamplerWithoutReplacement(SliceSamplerTests):
    replacement = False

    def make(self, **options: Any) -> SliceSamplerWithoutReplacement:
        return SliceSamplerWithoutReplacement(**options)


class TestInOrder(SliceSamplerTests):
    replacement = False

    def make(self, **options: Any) -> SliceSamplerWithoutReplacement:
        return SliceSamplerWithoutReplacement(shuffle=False, **options)


class TestPrioritizedSliceSampler(SliceSamplerTests):
    uniform_over = "step"  # all have the same priority

    def make(self, **options: Any) -> PrioritizedSliceSampler:
        return PrioritizedSliceSampler(24, 0.7, 0.5, **options)
