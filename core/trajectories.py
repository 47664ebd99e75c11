"""Trajectories inside a batch of steps: where they end, and how to put each into a row of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor

from .errors import MissingKeyError, SchemaError, suggests_keywords
from .ted.schema import DEFAULT_DONE_KEYS, TRAJECTORY_KEYS

NestedKey: TypeAlias = str | tuple[str, ...]

_MASKS: tuple[tuple[str, ...], ...] = (("collector", "mask"), ("mask",))


def key_path(key: NestedKey) -> tuple[str, ...]:
    """Write a key as the tuple of its parts."""
    return (key,) if isinstance(key, str) else tuple(key)


def leaves(td: TensorDictBase) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every leaf with its path, including non-tensor leaves."""
    for key, value in td.items(True, True, is_leaf=is_leaf_nontensor):
        yield key_path(key), value


def require_steps(data: Any) -> None:
    """Raise SchemaError (a RuntimeError) unless `data` is a tensordict with a dimension of time."""
    if not isinstance(data, TensorDictBase):
        raise SchemaError(f"expected a tensordict of steps, found a {type(data).__name__}")
    if not data.ndim:
        raise SchemaError("the tensordict has no batch dimension, expected a dimension of time")


def step_ends(
    td: TensorDictBase, done_key: NestedKey = "done", flags: Sequence[str] = DEFAULT_DONE_KEYS
) -> torch.Tensor:
    """Return where steps end a trajectory, bool `[..., T]`: at any flag of the family of `done_key` under `next`.

    The family is the key itself and its existing siblings among `flags`. A flag with several values a step, for
    example one an agent, ends the trajectory if any of them is set. MissingKeyError (a KeyError) if there are no flags.
    """
    path = key_path(done_key)
    family = dict.fromkeys(("next", *path[:-1], name) for name in (path[-1], *flags))
    # The extra dimension lets `flatten` treat flags `[..., T]` like flags `[..., T, n]`, also if there are no steps.
    found = [
        value.bool().unsqueeze(-1).flatten(td.batch_dims).any(-1)
        for key in family
        if (value := td.get(key, None)) is not None
    ]
    if not found:
        raise MissingKeyError(f"{'.'.join(('next', *path))} not found, so the ends of trajectories are unknown")
    return torch.stack(found).any(0)


def _per_step(td: TensorDictBase, key: tuple[str, ...]) -> torch.Tensor:
    """Return an entry with one value a step in the shape of the batch."""
    value: torch.Tensor = td.get(key)
    if value.shape == (*td.batch_size, 1):
        value = value.squeeze(-1)
    if value.shape != td.batch_size:
        expected = [*td.batch_size, 1]
        raise SchemaError(f"{'.'.join(key)} is {list(value.shape)}, expected one value a step: {expected}")
    return value


def trajectory_ids(td: TensorDictBase) -> torch.Tensor | None:
    """Return the trajectory ids of steps in the shape of the batch; None if there are none."""
    return next((ids for key in TRAJECTORY_KEYS["batches"] if (ids := _one_per_step(td, key)) is not None), None)


def step_mask(td: TensorDictBase, key: NestedKey | None = None) -> torch.Tensor | None:
    """Return which steps are not padding, bool in the shape of the batch; None if there is no mask.

    Without a key, `("collector", "mask")` or "mask" is used if it has one value a step. SchemaError (a RuntimeError) if
    the entry at `key` has another shape.
    """
    if key is None:
        found = next((mask for path in _MASKS if (mask := _one_per_step(td, path)) is not None), None)
    else:
        path = key_path(key)
        found = None if td.get(path, None) is None else _per_step(td, path)
    return None if found is None else found.bool()


def is_cut_behind(td: TensorDictBase, mask: torch.Tensor | None) -> torch.Tensor:
    """Return where the next step belongs to another trajectory or is padding, regardless of flags; bool like the batch.

    Trajectories are identified by their ids; `mask` marks the steps that are not padding.
    """
    found = torch.zeros(td.batch_size, dtype=torch.bool, device=td.device)
    for value in (trajectory_ids(td), mask):
        if value is not None:
            found[..., :-1] |= value[..., 1:] != value[..., :-1]
    return found


def _one_per_step(td: TensorDictBase, key: tuple[str, ...]) -> torch.Tensor | None:
    """Return an entry in the shape of the batch; None if there is none with one value a step."""
    value = td.get(key, None)
    if not isinstance(value, torch.Tensor) or value.numel() != td.batch_size.numel():
        return None
    return value.reshape(td.batch_size)


@suggests_keywords()
def split_trajectories(
    td: TensorDictBase,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDictBase:
    """Put every trajectory of a batch `[T]` or `[..., T]` into a row of its own, in the order in which they begin.

    A trajectory is a run of one id along the last dimension; an id that occurs again later, or in another row of the
    batch, is another trajectory. Without ids, trajectories end at a done flag and at the ends of rows; they are then
    numbered, and the numbers stored as ids. Steps excluded by a mask in `td` are left out, so that splitting twice
    changes nothing. `td` is not changed.

    Args:
        td: the steps.
        prefix: the nest of ids and mask; default "collector" if it exists.
        trajectory_key: the entry with ids; default `(prefix, "traj_ids")`, else "traj_ids". The mask is next to it.
        done_key: the flag under `next` that ends trajectories, as do "terminated" and "truncated" next to it.
        as_nested: True, or a `torch.layout`, returns ragged tensors.

    Returns:
        A tensordict `[N, T_max]`, padded with zeros (non-tensor data with the trajectory's last value), with a bool
        mask `[N, T_max]` of real steps. With `as_nested`, a tensordict `[N, -1]` of ragged tensors without a mask: `[N,
        T]` if all have the same length, `[N]` for `torch.jagged`.

    Raises:
        MissingKeyError: (a KeyError) there are neither ids nor flags, or no given `trajectory_key`.
        SchemaError: (a RuntimeError) the batch has no time, or ids or flags do not have one value a step.

    Name and layout are the same as in TorchRL.
    """
    require_steps(td)
    ids_key, mask_key = _ids_and_mask(td, prefix, trajectory_key)
    position = torch.arange(td.batch_size.numel(), device=td.device)
    if td.get(mask_key, None) is not None:
        position = position[_per_step(td, mask_key).bool().reshape(-1)]
    begins = _begins(td, ids_key, done_key, position)
    steps = td.exclude(mask_key).reshape(-1)
    steps = steps.copy() if len(position) == td.batch_size.numel() else steps[position]
    if td.get(ids_key, None) is None:
        steps.set(ids_key, begins.cumsum(0) - 1)
    starts = begins.nonzero().squeeze(-1)
    lengths = torch.diff(starts, append=starts.new_tensor([len(position)]))
    if as_nested is not False:
        return _ragged(steps, lengths, torch.strided if as_nested is True else as_nested)
    return _padded(steps, starts, lengths, mask_key)


def _ids_and_mask(
    td: TensorDictBase, prefix: NestedKey | None, trajectory_key: NestedKey | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if trajectory_key is not None:
        path = key_path(trajectory_key)
        if td.get(path, None) is None:
            found = ", ".join(".".join(key) for key, _ in leaves(td)) or "no entries"
            raise MissingKeyError(
                f"the trajectory_key {'.'.join(path)} is not in the batch, which has {found}",
                hint="leave trajectory_key out to number trajectories by their done flags",
            )
        return path, (*path[:-1], "mask")
    if prefix is None:
        prefix = ("collector",) if "collector" in td.keys() else ()  # noqa: SIM118  # not a dict
    return (*key_path(prefix), "traj_ids"), (*key_path(prefix), "mask")


def _begins(
    td: TensorDictBase, ids_key: tuple[str, ...], done_key: NestedKey | None, position: torch.Tensor
) -> torch.Tensor:
    """Return, for every step that is kept, whether a trajectory begins there; bool `[steps]`."""
    begins = torch.ones(len(position), dtype=torch.bool, device=position.device)
    time = max(td.shape[-1], 1)
    apart = (position.diff() != 1) | ((position // time).diff() != 0)
    if td.get(ids_key, None) is not None:
        ids = _per_step(td, ids_key).reshape(-1)[position]
        begins[1:] = apart | (ids[1:] != ids[:-1])
    else:
        ends = step_ends(td, "done" if done_key is None else done_key).reshape(-1)[position]
        begins[1:] = apart | ends[:-1]
    return begins


def _padded(
    steps: TensorDictBase, starts: torch.Tensor, lengths: torch.Tensor, mask_key: tuple[str, ...]
) -> TensorDictBase:
    longest = int(lengths.max()) if len(lengths) else 0
    column = torch.arange(longest, device=starts.device)
    mask = column < lengths[:, None]
    if len(steps) == mask.numel():
        rows = steps.reshape(len(lengths), longest)
    else:
        # Padding first repeats a step of its trajectory, so that non-tensor data is padded, too.
        rows = steps[starts[:, None] + torch.minimum(column, lengths[:, None] - 1)]
        padding = ~mask
        for value in rows.values(True, True):
            if isinstance(value, torch.Tensor):
                value[padding] = 0
    rows.set(mask_key, mask)
    return rows


def _ragged(steps: TensorDictBase, lengths: torch.Tensor, layout: torch.layout) -> TensorDictBase:
    if not len(lengths):
        raise SchemaError("the batch has no steps, but ragged tensors need at least one trajectory")
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    sizes = lengths.tolist()

    def leaf(value: Any) -> torch.Tensor:
        if layout == torch.jagged:
            return torch.nested.nested_tensor_from_jagged(value, offsets=offsets)
        return torch.nested.as_nested_tensor(list(value.split(sizes)), layout=layout)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        nest: dict[tuple[str, ...], torch.Tensor] = {}
        for path, value in leaves(steps):
            if not isinstance(value, torch.Tensor):
                raise SchemaError(f"{'.'.join(path)} is not a tensor, and only tensors can be ragged")
            nest[path] = leaf(value)
        # tensordict reports a ragged dimension only for strided tensors, and only if their lengths differ
        time = [] if layout == torch.jagged else [-1] if len(set(sizes)) > 1 else sizes[:1]
        out = TensorDict({}, batch_size=[len(sizes), *time])
        for path, value in nest.items():
            out.set(path, value)
    return out
