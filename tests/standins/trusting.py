"""Readers of pickles that trust their files, for the tests of the contract, which know no options."""

from __future__ import annotations

from typing import Any

from rbtool.core.format.converter import Reader

TRUST: dict[str, Any] = {"trust_pickle": True}


def trusting(kind: type[Reader]) -> type[Reader]:
    """Return the reader with the option that its format needs."""

    def on_open(self: Any) -> None:
        self.options = {**self.options, **TRUST}
        kind.on_open(self)

    return type("Trusting", (kind,), {"on_open": on_open})
