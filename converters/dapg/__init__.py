"""Human demonstrations of DAPG (hand_dapg): pickles of paths are read."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="dapg",
        package=__name__,
        order=24,
        reader="reader:DapgReader",
        title="DAPG",
        found="a pickle of a list of dictionaries with observations, actions and rewards; needs --trust-pickle",
        ends="the end of an entry of the list; terminals, timeouts or --ends state how",
        final="where stored",
    ),
)
