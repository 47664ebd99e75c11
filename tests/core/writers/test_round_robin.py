from __future__ import annotations

from rbtool.core.testing.writers import RingTests
from rbtool.core.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter


class TestRoundRobinWriter(RingTests):
    def make(self) -> RoundRobinWriter:
        return RoundRobinWriter()


class TestOfThisProcessAlone(RingTests):
    kinds = ("tensor",)
    shares = False

    def make(self) -> RoundRobinWriter:
        return RoundRobinWriter(compilable=True)


class TestWithGenerations(RingTests):
    kinds = ("tree",)

    def make(self) -> RoundRobinWriter:
        return RoundRobinWriter(track_generations=True)


class TestTensorDictRoundRobinWriter(RingTests):
    kinds = ("tensordict", "nested")
    labels = True

    def make(self) -> TensorDictRoundRobinWriter:
        return TensorDictRoundRobinWriter()
