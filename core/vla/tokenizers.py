"""Actions as tokens: uniform bins, and OpenVLA's bins at the end of a language model's vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import MissingKeyError, SchemaError, UsageError
from .dataset import RobotDatasetMetadata

_TINY = 1e-8
"""OpenVLA adds this to the width of a range."""


class ActionTokenizerBase(torch.nn.Module, ABC):
    """Turns actions into tokens and back. It is a module, so that its constants move to a device with a model.

    Subclasses implement `encode(actions)`, from floats `[..., action_dim]` to int64 of the same shape,
    `decode(tokens)`, back to float32, and `vocab_size`.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The size of the vocabulary; all tokens are smaller."""

    @abstractmethod
    def encode(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the tokens of actions, int64 of the same shape."""

    @abstractmethod
    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the actions that tokens stand for, float32 of the same shape."""

    def forward(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the tokens of actions."""
        return self.encode(actions)


class UniformActionTokenizer(ActionTokenizerBase):
    """Divides the range of each action dimension into `num_bins` bins of equal width; a token is the index of a bin.

    Actions outside of the range get the first or last bin; `decode` returns the centres of bins. The arguments match
    TorchRL's class, which encodes NaN as some token, while this one raises.

    Args:
        num_bins: the number of bins per dimension.
        low, high: the range, numbers or `[action_dim]`.
        action_dim: the width of actions, if the bounds are numbers.

    Raises:
        UsageError (a ValueError): bounds are not finite, not in order or of different shapes, or there is no bin.
        SchemaError (a RuntimeError): actions are NaN or of another width, or tokens are not bins.

    >>> tokenizer = UniformActionTokenizer(4, low=-1.0, high=1.0)
    >>> tokens = tokenizer.encode(torch.tensor([-2.0, -0.3, 0.0, 1.0]))
    >>> tokens, tokenizer.decode(tokens)
    (tensor([0, 1, 2, 3]), tensor([-0.7500, -0.2500,  0.2500,  0.7500]))
    """

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, num_bins: int, *, low: Any, high: Any, action_dim: int | None = None) -> None:
        super().__init__()
        self.num_bins = _count("num_bins", num_bins, 1)
        low, high = (_floats(name, value) for name, value in (("low", low), ("high", high)))
        _require_range("low", low, "high", high)
        if not bool((low < high).all()):
            raise UsageError("expected low below high in every dimension")
        dim = len(low) if low.dim() else None
        if action_dim is not None and dim not in (None, action_dim):
            raise UsageError(f"action_dim is {action_dim}, but the bounds have {dim}")
        self.action_dim = None if action_dim is None and dim is None else _count("action_dim", action_dim or dim, 1)
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    @classmethod
    def from_metadata(cls, metadata: RobotDatasetMetadata, num_bins: int) -> UniformActionTokenizer:
        """Create a tokenizer for the action bounds of a dataset; UsageError (a ValueError) if they are not known."""
        if metadata.action_low is None or metadata.action_high is None:
            raise UsageError(f"the action bounds of {metadata.dataset_id!r} are not known")
        return cls(num_bins, low=metadata.action_low, high=metadata.action_high, action_dim=metadata.action_dim)

    @property
    def vocab_size(self) -> int:
        """The number of bins."""
        return self.num_bins

    def encode(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the bins of actions."""
        actions = _actions(actions, self.action_dim).to(torch.float64)
        low, high = self.low.to(torch.float64), self.high.to(torch.float64)
        part = (actions.clamp(low, high) - low) / (high - low)
        return (part * self.num_bins).floor().to(torch.int64).clamp(0, self.num_bins - 1)

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the centres of bins."""
        _require_tokens(tokens, self.num_bins, self.action_dim)
        low, high = self.low.to(torch.float64), self.high.to(torch.float64)
        return (low + (tokens + 0.5) / self.num_bins * (high - low)).to(torch.float32)


class VocabTailActionTokenizer(ActionTokenizerBase):
    """OpenVLA's action tokens: bins of [-1, 1] are the last tokens of a vocabulary, in descending order.

    Actions are first scaled from [`norm_low`, `norm_high`] to [-1, 1]. With V the size of the vocabulary and
    `num_bins` equally spaced edges from -1 to 1, an action x becomes the token V - digitize(x, edges):

        action   -1                       1
        edges     |     |     |     |     |
        token       V-1   V-2   V-3   V-4

    `decode` returns the centres between edges; a token that stands for no bin, as a model may produce one, is decoded
    as the nearest bin. The tokens match OpenVLA, the arguments TorchRL.

    Args:
        num_bins: the number of edges.
        full_vocab_size: V; by default `num_bins`.
        norm_low, norm_high: the range of actions `[action_dim]` that is scaled to [-1, 1]; for OpenVLA the 1st and 99th
            percentile. None for no scaling.
        norm_mask: bool `[action_dim]`; dimensions where it is False, such as a gripper, are not scaled.
        gripper_binarize: let `decode` round the dimensions that are not scaled to 1 (above
            `gripper_binarize_threshold`) or -1.
        gripper_invert: let `decode` change their sign.

    Raises:
        UsageError (a ValueError): there are fewer than 2 bins, or more bins than tokens in the vocabulary; a range is
            not finite, not in order, of another shape, or incomplete.
        SchemaError (a RuntimeError): actions are NaN or of another width, or tokens are outside of the vocabulary.

    >>> tokenizer = VocabTailActionTokenizer(256, full_vocab_size=32000)
    >>> tokens = tokenizer.encode(torch.tensor([-1.0, 0.0, 1.0]))
    >>> tokens, tokenizer.decode(tokens)
    (tensor([31999, 31872, 31744]), tensor([-0.9961,  0.0000,  0.9961]))
    """

    norm_low: torch.Tensor | None
    norm_high: torch.Tensor | None
    norm_mask: torch.Tensor | None

    def __init__(
        self,
        num_bins: int = 256,
        *,
        full_vocab_size: int | None = None,
        norm_low: Any = None,
        norm_high: Any = None,
        norm_mask: Any = None,
        gripper_binarize: bool = False,
        gripper_binarize_threshold: float = 0.0,
        gripper_invert: bool = False,
    ) -> None:
        super().__init__()
        self.num_bins = _count("num_bins", num_bins, 2)
        self.full_vocab_size = full_vocab_size
        if full_vocab_size is not None and _count("full_vocab_size", full_vocab_size, 1) < num_bins:
            raise UsageError(f"full_vocab_size is {full_vocab_size}, expected at least the {num_bins} bins")
        self.gripper_binarize, self.gripper_invert = gripper_binarize, gripper_invert
        self.gripper_binarize_threshold = gripper_binarize_threshold
        if (norm_low is None) != (norm_high is None):
            raise UsageError("only one of norm_low and norm_high is set, expected both or neither")
        low = high = mask = None
        if norm_low is not None:
            low, high = (_floats(name, value) for name, value in (("norm_low", norm_low), ("norm_high", norm_high)))
            _require_range("norm_low", low, "norm_high", high)
            mask = torch.ones_like(low, dtype=torch.bool) if norm_mask is None else torch.as_tensor(norm_mask).bool()
            if mask.shape != low.shape:
                raise UsageError(f"norm_mask is {list(mask.shape)}, expected {list(low.shape)}")
        elif norm_mask is not None:
            raise UsageError("norm_mask is set, but norm_low and norm_high are None")
        edges = torch.from_numpy(np.linspace(-1, 1, num_bins))  # torch.linspace rounds differently
        self.register_buffer("edges", edges, persistent=False)
        for name, value in (("norm_low", low), ("norm_high", high), ("norm_mask", mask)):
            self.register_buffer(name, value)

    edges: torch.Tensor

    @classmethod
    def from_norm_stats(
        cls, norm_stats: Mapping[str, Any], unnorm_key: str, **options: Any
    ) -> VocabTailActionTokenizer:
        """Create a tokenizer from OpenVLA's statistics.

        `norm_stats[unnorm_key]["action"]` has `q01`, `q99` and optionally `mask`; MissingKeyError (a KeyError) if the
        dataset or one of the first two is missing.
        """
        if unnorm_key not in norm_stats:
            raise MissingKeyError(f"{unnorm_key!r} is not in the statistics, which have {', '.join(norm_stats)}")
        found = norm_stats[unnorm_key].get("action", {})
        missing = [name for name in ("q01", "q99") if name not in found]
        if missing:
            raise MissingKeyError(f"{' and '.join(missing)} of actions are missing in the statistics of {unnorm_key!r}")
        return cls(norm_low=found["q01"], norm_high=found["q99"], norm_mask=found.get("mask"), **options)

    @property
    def vocab_size(self) -> int:
        """The size of the whole vocabulary."""
        return self.num_bins if self.full_vocab_size is None else self.full_vocab_size

    @property
    def action_dim(self) -> int | None:
        """The width of actions; None if no range is given."""
        return len(self.norm_low) if self.norm_low is not None and self.norm_low.dim() else None

    def encode(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the tokens of actions."""
        actions = _actions(actions, self.action_dim)
        if self.norm_low is not None and self.norm_high is not None and self.norm_mask is not None:
            low, high = self.norm_low.to(actions.dtype), self.norm_high.to(actions.dtype)
            actions = (2 * (actions - low) / (high - low + _TINY) - 1).where(self.norm_mask, actions)
        places = torch.bucketize(actions.to(torch.float64).clamp(-1, 1).contiguous(), self.edges, right=True)
        return self.vocab_size - places

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the actions that tokens stand for."""
        _require_tokens(tokens, self.vocab_size, self.action_dim)
        centres = (self.edges[1:] + self.edges[:-1]) / 2
        actions = centres[(self.vocab_size - tokens - 1).clamp(0, self.num_bins - 2)]
        if self.norm_low is not None and self.norm_high is not None and self.norm_mask is not None:
            scaled = 0.5 * (actions + 1) * (self.norm_high - self.norm_low + _TINY) + self.norm_low
            actions = scaled.where(self.norm_mask, self._gripper(actions))
        return actions.to(torch.float32)

    def _gripper(self, values: torch.Tensor) -> torch.Tensor:
        if self.gripper_binarize:
            values = torch.where(values > self.gripper_binarize_threshold, 1.0, -1.0).to(values.dtype)
        return -values if self.gripper_invert else values


def _count(name: str, number: Any, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise UsageError(f"{name} is {number!r}, expected a whole number from {least}")
    return number


def _floats(name: str, given: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(given, dtype=torch.float64).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} has to be numbers: {error}") from error


def _require_range(low_name: str, low: torch.Tensor, high_name: str, high: torch.Tensor) -> None:
    """Raise UsageError unless two tensors are the lower and upper ends of ranges."""
    if low.shape != high.shape or low.dim() > 1:
        raise UsageError(f"{low_name} is {list(low.shape)} and {high_name} {list(high.shape)}, expected [action_dim]")
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise UsageError(f"{low_name} or {high_name} is not finite")
    if not bool((low <= high).all()):
        raise UsageError(f"{low_name} is above {high_name} in some dimension")


def _require_width(found: torch.Tensor, width: int | None, what: str) -> None:
    if width is not None and (not found.dim() or found.shape[-1] != width):
        raise SchemaError(f"{what} are {list(found.shape)}, expected [..., {width}]")


def _actions(actions: torch.Tensor, width: int | None) -> torch.Tensor:
    """Return actions as float32, or unchanged if float64; SchemaError for NaN and for another width."""
    _require_width(actions, width, "actions")
    if bool(actions.isnan().any()):
        raise SchemaError("actions contain NaN, for which there is no token", hint="drop or repair those steps")
    return actions if actions.dtype == torch.float64 else actions.to(torch.float32)


def _require_tokens(tokens: torch.Tensor, size: int, width: int | None) -> None:
    """Raise SchemaError unless these are tokens of a vocabulary of this size."""
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise SchemaError(f"tokens are {tokens.dtype}, expected whole numbers")
    _require_width(tokens, width, "tokens")
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        raise SchemaError(f"tokens are from {int(tokens.min())} to {int(tokens.max())}, expected 0 to {size - 1}")
