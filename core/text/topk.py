"""A transform that writes only the best answers to each prompt to a buffer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, is_tensor_collection, lazy_stack

from ..errors import MissingKeyError, SchemaError, UsageError, WrongKindError, require_flags, require_number
from ..format.contracts import FinalMethodError
from ..storages.base import copied
from ..storages.list_storage import document_of, tree_from, tree_of
from ..ted.schema import as_key
from ..transforms.base import Transform
from ..transforms.keyed import in_double

_LOG = logging.getLogger("rbtool.text")


class _Dialogue(NamedTuple):
    """A finished dialogue: its score, and its rows, tensordicts without a batch size."""

    score: float
    rows: tuple[Any, ...]


class TopKRewardSelector(Transform):
    """Writes only the best of the dialogues that share a prompt, as soon as there are enough to compare.

    A dialogue consists of one or more rows, up to the row whose done flag is set. Its score is the mean of its rewards.

    Each prompt has a queue of its last `total_dialog_turns` dialogues. While the queue is not full, `extend` writes
    nothing and returns an empty index. When it is full, every further dialogue triggers a selection: the dialogues in
    the queue with a score above the lower median are written, the best first, at most `topk_size` and never more than
    half of them. A dialogue that stays among the best is written again, unless `clear_after_selection` is set. The
    queues are part of the buffer's state and checkpoints; `empty()` clears them.

    The data are rows with any batch size, dense or lazily stacked; rows are along the last dimension. Names and
    arguments match TorchRL's transform, which only accepts lazy stacks of dialogues of one row.

    Args:
        total_dialog_turns: the number of dialogues of a prompt that are compared.
        topk_size: the largest number of dialogues that are written.
        prompt_key: the entry with the prompt, a text.
        rewards_key: the entry with the rewards of a row: one, `[1]`, or one for each token, `[L, 1]`.
        done_key: the entry whose last value says whether a dialogue ends with the row.
        verbose: log selections, with the logger "rbtool.text" and the level INFO.
        clear_after_selection: clear the queue of a prompt after a selection, so that each dialogue is compared once.

    Raises:
        UsageError: (a ValueError) `topk_size` is above `total_dialog_turns`, or one of them is not a count.
        SchemaError: (a RuntimeError) the last row of the data does not end a dialogue.
        MissingKeyError: (a KeyError) the data lack an entry.
        WrongKindError: (a TypeError) the prompt is not a text. After an error, nothing is written or added to a queue.

    >>> from rbtool import LazyStackStorage, ReplayBuffer
    >>> from tensordict import TensorDict
    >>> buffer = ReplayBuffer(storage=LazyStackStorage(10), transform=TopKRewardSelector(4, 2))
    >>> rewards = torch.tensor([1.0, 4.0, 2.0, 3.0]).unsqueeze(-1)
    >>> steps = {"reward": rewards, "done": torch.ones(4, 1, dtype=torch.bool)}
    >>> text = TensorDict({"prompt": "Count!"}, batch_size=[4])
    >>> buffer.extend(TensorDict({"next": TensorDict(steps, batch_size=[4]), "text": text}, batch_size=[4]))
    tensor([0, 1])
    >>> buffer[:]["next", "reward"].flatten()
    tensor([4., 3.])
    """

    counts_writes = True

    def __init__(
        self,
        total_dialog_turns: int,
        topk_size: int,
        prompt_key: NestedKey = ("text", "prompt"),
        rewards_key: NestedKey = ("next", "reward"),
        done_key: NestedKey = ("next", "done"),
        verbose: bool = True,
        *,
        clear_after_selection: bool = False,
    ) -> None:
        super().__init__()
        require_flags(verbose=verbose, clear_after_selection=clear_after_selection)
        self.total_dialog_turns = require_number("total_dialog_turns", total_dialog_turns, 1, "dialogues")
        self.topk_size = topk_size and require_number("topk_size", topk_size, 1, "dialogues")
        if topk_size > total_dialog_turns:
            raise UsageError(f"topk_size is {topk_size}, and only {total_dialog_turns} dialogues are compared")
        self.prompt_key, self.rewards_key, self.done_key = map(as_key, (prompt_key, rewards_key, done_key))
        self.verbose = verbose
        self.clear_after_selection = clear_after_selection
        self._queues: dict[str, tuple[_Dialogue, ...]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_aggregate_rewards" in vars(cls):
            raise FinalMethodError(
                f"{cls.__name__} has _aggregate_rewards(), which is never called", hint="implement aggregate(rewards)"
            )

    def aggregate(self, rewards: torch.Tensor) -> float | torch.Tensor:
        """Return the score of a dialogue from its rewards `[n, 1]`, in the order of rows; may be overridden."""
        return in_double(rewards).mean()

    def inv(self, data: Any) -> Any:
        """Return the rows to write now, `[n]`, as a lazy stack; None if there are none."""
        queues = dict(self._queues)  # assigned at the end, so that an error changes nothing
        written: list[Any] = []
        for rows in self._dialogues(data):
            prompt = self._entry(rows[0], self.prompt_key)
            if not isinstance(prompt, str):
                raise WrongKindError(f"the prompt is a {type(prompt).__name__}, expected a text")
            rewards = torch.cat([torch.as_tensor(self._entry(row, self.rewards_key)).reshape(-1, 1) for row in rows])
            dialogue = _Dialogue(float(self.aggregate(rewards)), tuple(map(copied, rows)))
            queue = (*queues.get(prompt, ()), dialogue)[-self.total_dialog_turns :]
            if len(queue) == self.total_dialog_turns:
                best = self._best(queue)
                written += [row for one in best for row in one.rows]
                if self.verbose:
                    _LOG.info("%d of %d dialogues are written for the prompt %.40r", len(best), len(queue), prompt)
                queue = () if self.clear_after_selection else queue
            queues[prompt] = queue
        self._queues = {prompt: queue for prompt, queue in queues.items() if queue}
        return lazy_stack(written) if written else None

    def _best(self, queue: tuple[_Dialogue, ...]) -> list[_Dialogue]:
        """Return the dialogues with a score above the lower median, the best first; none if a score is NaN."""
        scores = sorted(one.score for one in queue)
        if any(map(math.isnan, scores)):
            return []
        median = scores[(len(scores) - 1) // 2]
        above = [one for one in queue if one.score > median]
        return sorted(above, key=lambda one: -one.score)[: self.topk_size]

    def _dialogues(self, data: Any) -> Iterator[list[Any]]:
        """Yield the rows of each dialogue. A dialogue ends with the row whose done flag is set."""
        if isinstance(data, list):
            data = lazy_stack(data)
        if not is_tensor_collection(data) or not data.ndim:
            what = "without a batch size" if is_tensor_collection(data) else f"of the type {type(data).__name__}"
            raise SchemaError(f"expected a tensordict of rows, found data {what}")
        if data.ndim > 1:
            for lane in data.unbind(0):
                yield from self._dialogues(lane)
            return
        rows: list[Any] = []
        for row in data.unbind(0):
            rows.append(row)
            if bool(torch.as_tensor(self._entry(row, self.done_key)).reshape(-1)[-1]):
                yield rows
                rows = []
        if rows:
            raise SchemaError(f"the last row does not end a dialogue: {'.'.join(self.done_key)} is not set")

    @staticmethod
    def _entry(row: Any, key: tuple[str, ...]) -> Any:
        found = row.get(key, None)
        if found is None:
            raise MissingKeyError(f"the data have no {'.'.join(key)!r}")
        return getattr(found, "data", found) if not isinstance(found, torch.Tensor) else found

    # State -----------------------------------------------------------------------------------------

    def held_back(self) -> dict[str, tuple[_Dialogue, ...]]:
        """Return the dialogues in the queues, for `hold_back`."""
        return self._queues

    def hold_back(self, held: dict[str, tuple[_Dialogue, ...]] | None) -> None:
        """Replace the queues by those that `held_back` returned; None clears them."""
        self._queues = held or {}

    def get_extra_state(self) -> dict[str, Any]:
        """Return the dialogues in the queues, as tensors, numbers and texts."""
        return {
            prompt: [[one.score, [_row_state(row) for row in one.rows]] for one in queue]
            for prompt, queue in self._queues.items()
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load the state that `get_extra_state` returned; an empty state clears the queues."""
        self._queues = {
            prompt: tuple(_Dialogue(score, tuple(map(_row_of_state, rows))) for score, rows in queue)
            for prompt, queue in state.items()
        }

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict.setdefault(f"{prefix}_extra_state", {})  # TorchRL's state does not include the queues
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        waiting = sum(map(len, self._queues.values()))
        return f"total_dialog_turns={self.total_dialog_turns}, topk_size={self.topk_size}, waiting={waiting}"


def _row_state(row: Any) -> list[Any]:
    """Return a row as plain objects: a description of its structure, and its tensors."""
    tree = tree_of(row)
    about = document_of(tree, lambda tensor: {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}, portable=False)
    return [about, list(tree.leaves)]


def _row_of_state(state: Any) -> Any:
    about, tensors = state
    left = iter(tensors)
    return tree_from(about, lambda _, __: next(left), portable=False).unflatten(torch.clone)
