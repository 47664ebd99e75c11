from __future__ import annotations

import copy
import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest

from rbtool.core.storages.write_log import Counter


def count(counter: Counter) -> None:
    counter.value += 5


def test_numbers_of_64_bits_are_counted() -> None:
    for shared in (False, True):
        counter = Counter((1 << 63) - 2, shared=shared)
        counter.value += 1
        assert counter.value == (1 << 63) - 1
        with pytest.raises(OverflowError, match="does not fit into 64 bits"):
            counter.value += 1
        assert counter.value == (1 << 63) - 1


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_child_counts_on(method: str) -> None:
    counter = Counter(1 << 40)
    assert counter.share_() is counter
    child = multiprocessing.get_context(method).Process(target=count, args=(counter,))
    child.start()
    child.join()
    assert (counter.value, counter.shared) == ((1 << 40) + 5, True)


def test_a_copy_counts_for_itself() -> None:
    counter = Counter(3, shared=True)
    for other in (copy.deepcopy(counter), pickle.loads(pickle.dumps(counter))):
        other.value += 1
        assert (counter.value, other.value, other.shared) == (3, 4, False)


def test_it_is_not_passed_through_queues() -> None:
    with pytest.raises(RuntimeError, match="through inheritance"):
        ForkingPickler.dumps(Counter(3))
