from __future__ import annotations

import pytest
import torch

from rbtool.core.errors import SchemaError
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.writers.base import ImmutableDatasetWriter


@pytest.mark.parametrize("write", ["add", "extend"])
def test_every_write_is_refused(write: str) -> None:
    storage = TensorStorage(torch.arange(4))
    writer = ImmutableDatasetWriter()
    writer.register_storage(storage)
    with pytest.raises(RuntimeError, match="This dataset doesn't allow writing"):
        getattr(writer, write)(torch.zeros(1))
    assert (storage[:].tolist(), writer._cursor, writer._write_count) == ([0, 1, 2, 3], 0, 0)


def test_edge_01_11_emptying_is_refused_before_anything_changes() -> None:
    with pytest.raises(SchemaError, match="This dataset doesn't allow writing"):
        ImmutableDatasetWriter()._empty()


def test_there_is_no_state(tmp_path) -> None:
    writer = ImmutableDatasetWriter()
    writer.dumps(tmp_path)
    writer.loads(tmp_path)
    writer.load_state_dict(writer.state_dict())
    assert (writer.state_dict(), list(tmp_path.iterdir()), repr(writer)) == ({}, [], "ImmutableDatasetWriter()")
    with pytest.raises(SchemaError, match="has no state, found _cursor"):
        writer.load_state_dict({"_cursor": 0})
