"""Where the bytes of given tensors lie, if they can be copied without torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rbtool.core.storages import columns as tensors_module
from rbtool.core.storages.columns import TensorFinder, tensor_finder

COLUMNS = [torch.zeros(10, 3), torch.zeros(10, dtype=torch.int64), torch.zeros(10, 2, 2, dtype=torch.uint16)]


def ranges(columns: list[torch.Tensor]) -> list[tuple[int, int]]:
    return sorted((column.data_ptr(), column.data_ptr() + column.nbytes) for column in columns)


def finder(columns: list[torch.Tensor] = COLUMNS, dimensions: int = 1) -> TensorFinder:
    found = tensor_finder(columns, dimensions, ranges(columns))
    assert found is not None
    return found


def rows(count: int) -> list[torch.Tensor]:
    return [column[:count].clone() for column in COLUMNS]


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        *((rows(count), (count,)) for count in (1, 2, 10)),
        ([value[0] for value in rows(2)], ()),
        ([torch.zeros(8, *value.shape[1:], dtype=value.dtype)[5:7] for value in rows(2)], (2,)),
    ],
    ids=["one row", "two rows", "ten rows", "an element", "a view"],
)
def test_the_bytes_of_rows_are_found(values: list[torch.Tensor], shape: tuple[int, ...]) -> None:
    before = [value.clone() for value in values]
    found = finder().find(values, shape)
    assert found is not None
    assert list(found.addresses) == [value.data_ptr() for value in values]
    assert all(torch.equal(one, other) for one, other in zip(values, before, strict=True))


ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "type": torch.Tensor.double,
    "type of the same width": lambda value: value.view(torch.int32),
    "rows": lambda value: value[:1],
    "shape": lambda value: value.view(3, 2),
    "dimensions": lambda value: value[:, None],
    "numbers apart": lambda value: value.t().contiguous().t(),
    "numbers repeated": lambda value: value[:, :1].expand(2, 3),
    "device": lambda value: value.to("meta"),
    "layout": torch.Tensor.to_sparse,
    "stored": lambda value: COLUMNS[0][4:6],
}


@pytest.mark.parametrize("odd", ODD)
def test_other_tensors_are_not_found(odd: str) -> None:
    first, *others = rows(2)
    assert finder().find([ODD[odd](first), *others], (2,)) is None
    assert finder().find([first, *others], (2,)) is not None  # no error is left behind


APART: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every other row": lambda value: value.repeat_interleave(2, 0)[::2],
    "part of each row": lambda value: torch.cat([value, value], 2)[:, :, : value.shape[2]],
    "the other dimension first": lambda value: value.transpose(0, 1).contiguous().transpose(0, 1),
    "one row for all": lambda value: value[:1].expand(value.shape),
    "one lane for all": lambda value: value[:, :1].expand(value.shape),
}


@pytest.mark.parametrize("apart", APART)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_elements_with_gaps_between_them_are_copied(apart: str, count: int) -> None:
    columns = [torch.zeros(6, 3, 5), torch.zeros(6, 3, 2, dtype=torch.int16)]
    found = finder(columns, 2)
    values = [APART[apart](torch.randint(1, 99, (count, 3, width)).float()) for width in (5, 2)]
    values[1] = values[1].to(torch.int16) if values[1].is_contiguous() else APART[apart](values[1].to(torch.int16))
    sources = found.find(values, (count, 3))
    assert sources is not None
    if sources.steps is not None:
        found.copy(1, count, sources)
        assert all(torch.equal(column[1 : 1 + count], value) for column, value in zip(columns, values, strict=True))
        assert all(not column[0].any() and not column[1 + count :].any() for column in columns)
    assert (sources.steps is None) == all(value.is_contiguous() for value in values)


def test_a_dimension_of_size_1_has_any_stride() -> None:
    found = finder([torch.zeros(10, 3, 1)])
    value = torch.zeros(1, 2, 3).permute(1, 2, 0)
    assert value.is_contiguous()
    assert found.find([value], (2,)) is not None


def test_dimensions_that_count_elements_are_compared() -> None:
    found = finder([torch.zeros(5, 4, 3)], 2)
    assert found.find([torch.zeros(2, 4, 3)], (2, 4)) is not None
    assert found.find([torch.zeros(4, 3)], (4,)) is not None
    assert found.find([torch.zeros(2, 3, 4)], (2, 4)) is None


def test_memory_next_to_the_columns_is_not_theirs() -> None:
    whole = torch.zeros(40)
    found = finder([whole[:10], whole[30:]])
    assert found.find([whole[10:20], whole[20:30]], (10,)) is not None
    assert found.find([whole[10:20], whole[21:31]], (10,)) is None
    assert found.find([whole[9:19], whole[20:30]], (10,)) is None


def test_types_that_are_not_described_have_no_finder() -> None:
    assert tensor_finder([torch.zeros(4, dtype=torch.complex64)], 1, [(0, 1)]) is None


def test_a_torch_without_the_interface_has_no_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "_CAPSULE", "__no_such_interface__")
    assert tensor_finder(COLUMNS, 1, ranges(COLUMNS)) is None
