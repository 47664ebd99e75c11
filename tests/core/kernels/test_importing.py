from __future__ import annotations

import gc

import pytest

from rbtool.core.kernels.rows import collector_paused


def fail() -> None:
    assert not gc.isenabled()
    raise ImportError


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_inside_and_is_as_before_outside(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(ImportError), collector_paused():
            fail()
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if was else gc.disable()
