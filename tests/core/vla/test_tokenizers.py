"""Tokens of actions: against TorchRL's own figures, against numpy, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool import ActionTokenizerBase, RobotDatasetMetadata, UniformActionTokenizer, VocabTailActionTokenizer

FLOATS = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=20)
VALUES = torch.tensor([-2.0, -1.0, -0.9, -0.34, -0.33, 0.0, 0.3, 0.34, 0.9, 1.0, 2.0])


def test_uniform_tokens_of_torchrl() -> None:
    tokenizer = UniformActionTokenizer(4, low=-1.0, high=1.0, action_dim=2)
    actions = torch.tensor([[-2.0, -1.0], [-0.5, -0.500001], [0.0, 0.4999], [0.5, 0.9999], [1.0, 3.0]])
    tokens = tokenizer.encode(actions)
    assert tokens.tolist() == [[0, 0], [1, 0], [2, 2], [3, 3], [3, 3]]
    assert tokenizer.decode(tokens).tolist()[:3] == [[-0.75, -0.75], [-0.25, -0.75], [0.25, 0.25]]
    assert tokenizer.encode(torch.tensor([0, 1])).tolist() == [2, 3]
    assert tokenizer.encode(torch.tensor([torch.inf, -torch.inf])).tolist() == [3, 0]


def test_vocabulary_tails_of_torchrl() -> None:
    tail = [31999, 31999, 31987, 31915, 31914, 31872, 31834, 31829, 31757, 31744, 31744]
    assert VocabTailActionTokenizer(256, full_vocab_size=32000).encode(VALUES).tolist() == tail
    assert VocabTailActionTokenizer(4).encode(VALUES).tolist() == [3, 3, 3, 3, 2, 2, 2, 1, 1, 0, 0]
    decoded = VocabTailActionTokenizer(256, full_vocab_size=32000).decode(torch.tensor([31999, 31744, 31743, 0, 31745]))
    assert torch.allclose(decoded, torch.tensor([-0.9961, 0.9961, 0.9961, 0.9961, 0.9961]), atol=5e-5)


def test_ranges_of_torchrl() -> None:
    arguments: dict[str, Any] = {"norm_low": [-0.1, 0.0, 0.0], "norm_high": [0.1, 2.0, 1.0]}
    actions = torch.tensor([[-0.1, 0.0, 0.0], [0.1, 2.0, 1.0], [0.0, 1.0, 0.7]])
    gripper = VocabTailActionTokenizer(norm_mask=[True, True, False], gripper_binarize=True, **arguments)
    tokens = gripper.encode(actions)
    assert tokens.tolist() == [[255, 255, 128], [1, 0, 0], [128, 128, 39]]
    expected = torch.tensor([[-9.9608e-02, 3.9216e-03, -1.0], [9.9608e-02, 1.9961, 1.0], [5e-09, 1.0, 1.0]])
    assert torch.allclose(gripper.decode(tokens), expected, atol=5e-5)
    inverted = VocabTailActionTokenizer(
        norm_mask=[True, True, False], gripper_binarize=True, gripper_invert=True, **arguments
    )
    assert inverted.decode(tokens)[:, 2].tolist() == [1.0, -1.0, -1.0]
    assert VocabTailActionTokenizer(gripper_binarize=True, **arguments).encode(actions).tolist() == [
        [255, 255, 255], [1, 0, 0], [128, 128, 77]
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(FLOATS, st.integers(2, 300))
def test_tails_are_what_numpy_digitizes(values: list[float], bins: int) -> None:
    actions = torch.tensor(values, dtype=torch.float64)
    tokenizer = VocabTailActionTokenizer(bins, full_vocab_size=1000)
    tokens = tokenizer.encode(actions)
    edges = np.linspace(-1, 1, bins)
    assert tokens.tolist() == (1000 - np.digitize(np.clip(values, -1, 1), edges)).tolist()
    assert (tokenizer.decode(tokens) - actions.clamp(-1, 1)).abs().max() <= 2 / (bins - 1) + 1e-6


@settings(max_examples=60, deadline=None)
@given(FLOATS, st.integers(1, 300))
def test_centres_are_half_a_bin_away_at_most(values: list[float], bins: int) -> None:
    tokenizer = UniformActionTokenizer(bins, low=-2, high=1)
    actions = torch.tensor(values)
    tokens = tokenizer.encode(actions)
    assert tokens.min() >= 0
    assert tokens.max() < tokenizer.vocab_size == bins
    assert (tokenizer.decode(tokens) - actions.clamp(-2, 1)).abs().max() <= 1.5 / bins + 1e-6
    assert torch.equal(tokenizer.encode(tokenizer.decode(tokens)), tokens)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), ([0.0] * 4, 1.0), (0, [1.0] * 4)])
def test_numbers_are_repeated_for_all_dimensions(low: Any, high: Any) -> None:
    tokenizer = UniformActionTokenizer(8, low=low, high=high, action_dim=4)
    assert (tokenizer.low.tolist(), tokenizer.high.tolist(), tokenizer.action_dim) == ([0.0] * 4, [1.0] * 4, 4)
    assert tokenizer.encode(torch.tensor([[0.0, 0.5, 0.99, 1]])).tolist() == [[0, 4, 7, 7]]
    assert UniformActionTokenizer(8, low=0.0, high=1.0).low.shape == ()
    assert tokenizer.low.dtype == tokenizer.high.dtype == torch.float32


@pytest.mark.parametrize("bins", [2, 7, 256])
def test_edges_and_centres_are_part_of_the_state(bins: int) -> None:
    tokenizer = VocabTailActionTokenizer(bins, full_vocab_size=1000)
    assert (tokenizer.bins.shape, tokenizer.bin_centers.shape) == ((bins,), (bins - 1,))
    assert torch.equal(tokenizer.bins, torch.from_numpy(np.linspace(-1, 1, bins)))
    assert tokenizer.state_dict().keys() == {"bins", "bin_centers"}
    assert torch.equal(tokenizer.decode(torch.arange(999, 1000 - bins, -1)), tokenizer.bin_centers.float())


def test_tokenizers_of_metadata_and_statistics() -> None:
    metadata = RobotDatasetMetadata("x", action_dim=2, action_low=[-1, -2], action_high=[1, 2])
    tokenizer = UniformActionTokenizer.from_metadata(metadata, 8)
    assert isinstance(tokenizer, ActionTokenizerBase)
    assert tokenizer.encode(torch.zeros(2)).tolist() == [4, 4]
    assert {name: value.tolist() for name, value in tokenizer.state_dict().items()} == {
        "low": [-1.0, -2.0], "high": [1.0, 2.0]
    }  # fmt: skip
    with pytest.raises(ValueError, match="bounds"):
        UniformActionTokenizer.from_metadata(RobotDatasetMetadata("x"), 8)
    stats = {"bridge": {"action": {"q01": [-1.0, 0.0], "q99": [1.0, 2.0], "mask": [True, False]}}, "other": {}}
    tail = VocabTailActionTokenizer.from_norm_stats(stats, "bridge", full_vocab_size=32000)
    assert tail.encode(torch.zeros(2)).tolist() == [31872, 31872]
    for key, message in (("x", "bridge, other"), ("other", "q01 and q99")):
        with pytest.raises(KeyError, match=message):
            VocabTailActionTokenizer.from_norm_stats(stats, key)


@pytest.mark.parametrize(
    "tokenizer", [UniformActionTokenizer(8, low=[-1, -1], high=[1, 1]),
                  VocabTailActionTokenizer(8, norm_low=[-1, -1], norm_high=[1, 1])]
)  # fmt: skip
def test_what_is_no_action_or_token(tokenizer: Any) -> None:
    for actions in (torch.tensor([0.0, torch.nan]), torch.zeros(3), torch.tensor(0.0)):
        with pytest.raises(RuntimeError, match="actions "):
            tokenizer.encode(actions)
    for tokens in (torch.tensor([8, 0]), torch.tensor([-1, 0]), torch.zeros(2), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="tokens are"):
            tokenizer.decode(tokens)
    assert tokenizer.encode(torch.zeros(0, 2)).shape == tokenizer.decode(torch.zeros(0, 2).long()).shape == (0, 2)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (UniformActionTokenizer, {"num_bins": 0, "low": -1, "high": 1}),
        (UniformActionTokenizer, {"num_bins": 2.5, "low": -1, "high": 1}),
        (UniformActionTokenizer, {"num_bins": 4, "low": 1, "high": 1}),
        (UniformActionTokenizer, {"num_bins": 4, "low": 0, "high": float("inf")}),
        (UniformActionTokenizer, {"num_bins": 4, "low": [0, 0], "high": [1, 1, 1]}),
        (UniformActionTokenizer, {"num_bins": 4, "low": [0, 0], "high": [1, 1], "action_dim": 3}),
        (VocabTailActionTokenizer, {"num_bins": 1}),
        (VocabTailActionTokenizer, {"full_vocab_size": 100}),
        (VocabTailActionTokenizer, {"norm_low": [0.0]}),
        (VocabTailActionTokenizer, {"norm_low": [0.0], "norm_high": [1.0, 1.0]}),
        (VocabTailActionTokenizer, {"norm_low": [1.0], "norm_high": [0.0]}),
        (VocabTailActionTokenizer, {"norm_mask": [True]}),
        (VocabTailActionTokenizer, {"norm_low": [0.0], "norm_high": [1.0], "norm_mask": [True, False]}),
    ],
)
def test_invalid_arguments(kind: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|below|not finite|above|without|but"):
        kind(**arguments)


def test_the_width_of_actions_is_known_to_the_class() -> None:
    assert isinstance(UniformActionTokenizer.action_dim, property)
    assert UniformActionTokenizer(4, low=-1.0, high=1.0).action_dim is None
    assert UniformActionTokenizer(4, low=-1.0, high=1.0, action_dim=3).action_dim == 3
    assert UniformActionTokenizer(4, low=[-1.0, 0.0], high=[1.0, 1.0]).action_dim == 2
