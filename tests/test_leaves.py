"""Leaves fall off: what remains of the tree without one imports nothing that is gone."""

from __future__ import annotations

import leaves


def test_no_import_dangles_without_a_leaf() -> None:
    assert [f"{edge.importer} imports {edge.imported} of {edge.leaf}" for edge in leaves.unknown_edges()] == []


def test_declared_modules_exist() -> None:
    assert leaves.missing_declarations() == []
