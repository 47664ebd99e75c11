"""Hashes of rows and of bits, and numbers for hashes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from processes import Interpreter

import rbtool
from rbtool import BinaryToDecimal, HashToInt, RandomProjectionHash, SipHash

KINDS = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64,
]  # fmt: skip


ELSEWHERE = """
import torch
from rbtool import RandomProjectionHash, SipHash
x = torch.arange(12.0).reshape(3, 4) / 7
print(SipHash()(x).tolist(), RandomProjectionHash(n_components=5)(x).tolist())
"""


def test_chunks_of_bits_are_added() -> None:
    to_decimal = BinaryToDecimal(num_bits=4, device="cpu", dtype=torch.int32, convert_to_binary=True)
    found = to_decimal(torch.tensor([[0.0, 0, 1, 0, -5, 0, 0, 1], [0, 0, 0, 0, 0, 0, 10, 0]]))
    assert (found.dtype, found.tolist()) == (torch.int32, [3, 2])


def test_leading_dimensions_of_bits_stay() -> None:
    assert BinaryToDecimal(3)(torch.ones(2, 0, 6)).shape == (2, 0)
    assert BinaryToDecimal(3)(torch.ones(2, 4, 6)).eq(14).all()


@pytest.mark.parametrize(
    ("options", "bits", "message"),
    [
        ({"num_bits": 4}, torch.ones(2, 6), "the last dimension has 6 bits; expected a multiple of 4"),
        ({"num_bits": 4}, torch.ones(2, 3), "the last dimension has 3 bits"),
        ({"num_bits": 4}, torch.tensor(1), "the last dimension has 0 bits"),
        ({"num_bits": 2}, torch.tensor([0.5, 1]), "neither 0 nor 1"),
        ({"num_bits": 9, "dtype": torch.uint8}, torch.ones(9), "the sum 511 does not fit torch.uint8"),
        ({"num_bits": 0}, torch.ones(2), "num_bits is 0; expected a whole number from 1 to 62"),
    ],
)
def test_bits_that_cannot_be_read(options: dict[str, Any], bits: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BinaryToDecimal(**options)(bits)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_rows_with_the_same_bytes_have_the_same_hash(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1], [1, 1], [0, 1], [1, 0]]).to(dtype)
    first, second, third, last = SipHash()(x).tolist()
    assert first == third
    assert len({first, second, last}) == 3


def test_hashes_have_one_number_for_each_row() -> None:
    for shape in ((5,), (5, 3), (5, 2, 3), (0, 4)):
        found = SipHash()(torch.rand(shape))
        assert (found.dtype, found.shape) == (torch.int64, shape[:1])
    assert SipHash()(torch.rand(4, 0)).unique().numel() == 1


def test_views_are_hashed_as_their_values() -> None:
    x = torch.rand(4, 6)
    assert SipHash()(x[:, ::2]).equal(SipHash()(x[:, ::2].clone()))
    assert SipHash()(x[:1, 4:].unbind(1)[1]).equal(SipHash()(x[0, 5:]))
    imaginary = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert SipHash()(imaginary.imag).equal(SipHash()(imaginary.imag.clone()))


def test_rows_as_bytes() -> None:
    assert SipHash(as_tensor=False)(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)) == [b"\1\2", b"\3\4"]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: SipHash()(torch.tensor(3)), rbtool.SchemaError, "has no dimensions"),
        (lambda: SipHash()(torch.eye(2).to_sparse()), rbtool.SchemaError, "nested, sparse or without data"),
        (lambda: SipHash()(torch.empty(2, device="meta")), rbtool.SchemaError, "nested, sparse or without data"),
        (lambda: SipHash()("text"), rbtool.SchemaError, "is a str"),
        (lambda: SipHash(key=b"short"), rbtool.UsageError, "16 bytes"),
        (lambda: RandomProjectionHash(n_components=0), rbtool.UsageError, "n_components is 0"),
        (lambda: RandomProjectionHash(dtype_cast=torch.int64), rbtool.UsageError, "expected a floating type"),
        (lambda: RandomProjectionHash(init_method=lambda matrix: torch.ones(2, 2))(torch.rand(3, 4)),
         rbtool.SchemaError, r"init_method made \[2, 2\], expected \[4, 16\]"),
        (lambda: HashToInt()(torch.tensor([1.0])), rbtool.SchemaError, "expected hashes as an int64 tensor"),
        (lambda: HashToInt()([1, 2]), rbtool.SchemaError, "expected hashes as an int64 tensor"),
    ],
)  # fmt: skip
def test_hashes_of_nonsense_are_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_hashes_are_the_same_in_another_process(interpreter: Interpreter) -> None:
    done = interpreter.run(ELSEWHERE)
    x = torch.arange(12.0).reshape(3, 4) / 7
    torch.manual_seed(5)
    assert done.stdout == f"{SipHash()(x).tolist()} {RandomProjectionHash(n_components=5)(x).tolist()}\n"


def test_hashes_are_the_same_on_every_machine() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert SipHash()(x).tolist() == [6752233283298663015, 5288039822347683972]  # as OpenSSL has them
    assert RandomProjectionHash(n_components=5)(x).tolist() == [8397115385401445669, 1929067017555641282]


# Projections ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.001, 1, 1000])
def test_different_rows_are_projected_apart(scale: float) -> None:
    x = torch.randn(10_000, 100, generator=torch.Generator().manual_seed(0)) * scale
    module = RandomProjectionHash()
    found = module(x)
    assert (module.n_components, found.shape, found.unique().numel()) == (16, (10_000,), 10_000)


def test_a_row_has_the_same_hash_alone_and_in_any_batch() -> None:
    x = torch.randn(300, 500)
    whole, module = RandomProjectionHash()(x), RandomProjectionHash()
    assert torch.cat([module(row[None]) for row in x]).equal(whole)
    assert module(x.view(300, 20, 25)).equal(whole)


def test_rows_that_are_almost_alike_have_one_hash() -> None:
    x = torch.randn(1, 64)
    assert RandomProjectionHash()(torch.cat([x, x * (1 + 1e-7)])).unique().numel() == 1


def test_directions_of_an_init_method_are_kept_and_saved() -> None:
    module = RandomProjectionHash(n_components=3, init_method=torch.nn.init.normal_)
    x = torch.randn(5, 8)
    module.fit(x)
    other = RandomProjectionHash(n_components=3, init_method=torch.nn.init.normal_)
    other.load_state_dict(_through_a_file(module.state_dict()))
    assert other(x).equal(module(x))


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Numbers -------------------------------------------------------------------------------------------


def test_hashes_are_numbered_as_they_come() -> None:
    numbers = HashToInt()
    assert numbers(torch.tensor([[70, -3], [70, 5]]), extend=True).tolist() == [[0, 1], [0, 2]]
    assert numbers(torch.tensor([5, -3])).tolist() == [2, 1]
    assert len(numbers) == 3


def test_unknown_hashes_raise_and_are_not_added() -> None:
    numbers = HashToInt()
    with pytest.raises(KeyError, match="1 of 1 hashes were never seen"):
        numbers(torch.tensor([4]))
    numbers(torch.tensor([4]), extend=True)
    with pytest.raises(KeyError, match="2 of 3 hashes were never seen"):
        numbers(torch.tensor([4, 5, 6]))
    assert len(numbers) == 1


def test_numbers_are_saved() -> None:
    numbers, other = HashToInt(), HashToInt()
    numbers(torch.tensor([4, 9]), extend=True)
    other.load_state_dict(_through_a_file(numbers.state_dict()))
    assert other(torch.tensor([9, 4])).tolist() == [1, 0]
    other.load_state_dict(HashToInt().state_dict())
    assert len(other) == 0
