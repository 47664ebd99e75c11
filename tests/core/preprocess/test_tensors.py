from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass

from rbtool.core.preprocess.failures import ResultRefused
from rbtool.core.preprocess.processor import BlockColumn
from rbtool.core.preprocess.units import chunk_of, columns_of
from rbtool.core.ted.schema import DTYPES, Field

ROWS = 4
BASE = torch.arange(ROWS * 6, dtype=torch.float32).reshape(ROWS, 6)


@tensorclass
class Step:
    x: torch.Tensor


@pytest.mark.parametrize("name", DTYPES)
def test_every_element_type_goes_in_and_out_bit_for_bit(name: str) -> None:
    field = Field(("deep", "x"), name, (2,), "info")
    array = np.random.default_rng(0).integers(0, 2, (ROWS, 2 * field.numpy.itemsize), dtype=np.uint8).view(field.numpy)
    chunk = chunk_of({field.key: BlockColumn(name, array.copy())}, ROWS)
    assert (chunk.batch_size, str(chunk["deep", "x"].dtype)) == ((ROWS,), f"torch.{name}")
    ((key, (found, back)),) = columns_of(chunk, ROWS).items()
    assert (key, found, back.dtype) == (field.key, name, field.numpy)
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        BASE[:, ::2],
        BASE.t()[:ROWS, :ROWS],
        BASE[:, :1].expand(ROWS, 5),
        (BASE * 2).requires_grad_(),
        torch.nn.Parameter(BASE.clone()),
        torch.complex(BASE, -BASE).conj(),
        torch.complex(BASE, -BASE).conj().imag,
        torch.zeros(ROWS, 0),
        torch.arange(ROWS, dtype=torch.bfloat16).flip(0),
        torch.arange(ROWS).view(torch.uint64),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_views_of_any_kind_become_their_values(value: torch.Tensor) -> None:
    name, array = columns_of({"x": value}, ROWS)["x",]
    assert array.flags.c_contiguous
    back = torch.from_numpy(array.copy())
    back = back.view(torch.bfloat16) if name == "bfloat16" else back
    assert torch.equal(back, value.detach().resolve_conj().resolve_neg())


def test_dicts_arrays_and_tensorclasses_are_taken() -> None:
    found = columns_of({"a": np.arange(ROWS, dtype=">i2"), "b": {"c": Step(BASE, batch_size=[ROWS])}}, ROWS)
    assert {key: name for key, (name, _) in found.items()} == {("a",): "int16", ("b", "c", "x"): "float32"}
    assert found["a",][1].tolist() == [0, 1, 2, 3]


def test_a_lazy_stack_is_taken() -> None:
    lazy = LazyStackedTensorDict(*(TensorDict({"x": row}, []) for row in BASE))
    assert np.array_equal(columns_of(lazy, ROWS)["x",][1], BASE.numpy())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "it returned None, expected a tensordict of 4 rows"),
        (BASE, "it returned Tensor, expected a tensordict"),
        ([{"x": BASE}], "it returned list"),
        ({}, "it returned no tensors"),
        (TensorDict({"a": {}}, [ROWS]), "it returned no tensors"),
        ({"x": BASE[:3]}, "it returned 3 rows of 'x' for 4 steps, expected as many"),
        ({"x": torch.tensor(1.0)}, "it returned no rows of 'x' for 4 steps"),
        ({"x": {"y": "text"}}, "it returned str under 'x.y', expected a tensor"),
        (TensorDict({"x": NonTensorData("text")}, [ROWS]), "under 'x', expected a tensor"),
        (TensorDict({"x": NonTensorStack(*"abcd")}, [ROWS]), "under 'x', expected a tensor"),
        ({"x": np.array(list("abcd"))}, "it returned 'x' as <U1, which cannot be stored"),
        ({"x": BASE.to(torch.float8_e5m2)}, "it returned 'x' as torch.float8_e5m2, which cannot be stored"),
        ({"x": BASE.to_sparse()}, "a nested or sparse tensor under 'x'"),
        ({"x": BASE.to("meta")}, "without data"),
        ({3: BASE}, "the key 3 of type int; keys are strings"),
        ({"shape": BASE}, "the key 'shape', which tensordict keeps for itself; call it 'shape_'"),
        ({".rbtool": {"x": BASE}}, "the nested key '.rbtool', whose place in the folder is taken"),
    ],
)
def test_what_cannot_be_stored_is_named(result: object, message: str) -> None:
    with pytest.raises(ResultRefused, match=message):
        columns_of(result, ROWS)


def test_nested_tensors_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they are a prototype, once a process
        ragged = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    with pytest.raises(ResultRefused, match="nested or sparse"):
        columns_of({"x": ragged}, 2)
