"""Rows of tokens with padding on the left, which models generate from, or on the right."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import UsageError
from .prompts import PromptData


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokens int64 `[B, W]`, and where they are no padding, bool `[B, W]`.

    `new_places`, int64 `[B, T]`, are the places of the tokens that were generated, and `new`, bool `[B, T]`, whether
    the text had not ended before each.
    """

    ids: torch.Tensor
    real: torch.Tensor
    new_places: torch.Tensor
    new: torch.Tensor

    @property
    def width(self) -> int:
        """The number of places in a row."""
        return self.ids.shape[1]

    @property
    def lengths(self) -> torch.Tensor:
        """The number of tokens in each row, int64 `[B]`."""
        return self.real.sum(1)


def left_padded(batch: PromptData, pad: int) -> Sequences:
    """Return the prompts of a batch, with padding on the left; UsageError for one without a token."""
    prompts = batch.mask_label(pad)
    real = prompts.attention_mask.bool()
    lengths = real.sum(1)
    if not bool((lengths > 0).all()):
        raise UsageError(f"the prompt at {int((lengths == 0).nonzero()[0])} is empty: there is no token in it")
    order = real.long().argsort(dim=1, stable=True)[:, real.shape[1] - int(lengths.max()) :]
    none = order[:, :0]
    return Sequences(prompts.input_ids.gather(1, order), real.gather(1, order), none, none.bool())


def right_padded(prompts: Sequences, made: torch.Tensor, steps: int, ends: tuple[int, ...], pad: int) -> Sequences:
    """Join prompts with generated tokens, `[B, up to steps]`, up to the first that ends a text, padded on the right."""
    made = torch.nn.functional.pad(made, (0, steps - made.shape[1]), value=pad)
    count, _ = end_places(made, ends)
    index = torch.arange(steps, device=made.device)
    new = index < count.unsqueeze(1)
    ids, real = torch.cat((prompts.ids, made), 1), torch.cat((prompts.real, new), 1)
    order = real.long().argsort(dim=1, stable=True, descending=True)
    real = real.gather(1, order)
    ids = ids.gather(1, order).masked_fill(~real, pad)
    return Sequences(ids, real, prompts.lengths.unsqueeze(1) + index, new)


def end_places(made: torch.Tensor, ends: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many generated tokens are of the text, with the first that ends it, int64 `[B]`, and whether one does.

    Of a text that no token ends all are.
    """
    stops = torch.isin(made, torch.tensor(ends, dtype=made.dtype, device=made.device))
    ended = stops.any(1)
    return torch.where(ended, stops.long().argmax(1) + 1, made.shape[1]), ended
