"""The switch that forbids the network: asked before a client is made, so that nothing waits for a time-out."""

from __future__ import annotations

import os

from ..errors import NetworkError

__all__ = ["require_network"]

_OURS = "RBTOOL_OFFLINE"
_TRUE = frozenset({"1", "true", "yes", "on"})


def require_network(what: str, *variables: str) -> None:
    """Raise NetworkError if the environment forbids the network to what is about to be done.

    `RBTOOL_OFFLINE` counts always, each of `variables` (`HF_HUB_OFFLINE` for a hub) as well; 1, true, yes and on in
    any case forbid, everything else does not. `what` begins the sentence: `listing hf://ORGANISATION`.
    """
    for variable in (_OURS, *variables):
        value = os.environ.get(variable, "").strip()
        if value.lower() in _TRUE:
            raise NetworkError(f"{what} needs the network, which {variable}={value} forbids", hint=f"unset {variable}")
