"""The variables that forbid the network."""

from __future__ import annotations

import pytest

from rbtool.core.errors import NetworkError
from rbtool.core.remote.transport import require_network


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RBTOOL_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "Yes", "on", " 1 "])
@pytest.mark.parametrize("name", ["RBTOOL_OFFLINE", "HF_HUB_OFFLINE"])
def test_a_true_value_forbids(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(NetworkError, match=f"listing the hub needs the network, which {name}=") as raised:
        require_network("listing the hub", "HF_HUB_OFFLINE")
    assert raised.value.hint.split(", ")[0] == f"unset {name}"
    assert ("--offline" in raised.value.hint) is (name == "RBTOOL_OFFLINE")


@pytest.mark.parametrize("value", ["", "0", "false", "no", "off", "2"])
def test_other_values_allow(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_OFFLINE", value)
    require_network("listing", "HF_HUB_OFFLINE")


def test_a_variable_that_was_not_named_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    require_network("listing a bucket")
