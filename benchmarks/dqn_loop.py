"""Train a DQN on CartPole with three replay buffers that take turns: a bare NumPy ring, rbtool's, and TorchRL's.

    python benchmarks/dqn_loop.py [--rows 10000] [--rounds 15] [--cpu]

It shows how much of a small training loop the buffer takes, with everything else the same. The loop is from
CleanRL's `dqn.py`: one environment, a batch of 128 every 10 frames, a network of 120 and 84 units. A turn is 500 frames
with each buffer. The figures are the microseconds of a turn, and the time with another buffer divided by the time with
rbtool's. TorchRL is left out if it is not installed. On a busy machine, `--cpu` measures CPU time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from shared import peers
from shared.claims import Claim, Claims, Job, Watch, main
from tensordict import TensorDict
from torch.nn import functional

import rbtool

FRAMES, BATCH, TRAIN_EVERY, TARGET_EVERY, GAMMA = 500, 128, 10, 500, 0.99

Step = Mapping[str, Any]


class Buffer(Protocol):
    """The interface of a buffer that the loop uses."""

    def add(self, step: Step) -> object:
        """Store a step of the environment."""

    def sample(self) -> Any:
        """Return `BATCH` random steps, tensors by name."""


class NumpyRing:
    """A ring of NumPy arrays, with the row that is written next."""

    def __init__(self, rows: int) -> None:
        self._rows, self._next, self._filled = rows, 0, 0
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._random = np.random.default_rng(0)

    def add(self, step: Step) -> None:
        """Store a step of the environment."""
        if not self._arrays:
            first = {name: np.asarray(value) for name, value in step.items()}
            self._arrays = {name: np.zeros((self._rows, *one.shape), one.dtype) for name, one in first.items()}
        for name, array in self._arrays.items():
            array[self._next] = step[name]
        self._next = (self._next + 1) % self._rows
        self._filled = min(self._filled + 1, self._rows)

    def sample(self) -> dict[str, torch.Tensor]:
        """Return random steps."""
        chosen = self._random.integers(0, self._filled, BATCH)
        return {name: torch.from_numpy(array[chosen]) for name, array in self._arrays.items()}


class PeerBuffer:
    """TorchRL's buffer, which takes tensordicts."""

    def __init__(self, rows: int) -> None:
        self._buffer = peers.buffers.TensorDictReplayBuffer(
            storage=peers.buffers.LazyTensorStorage(rows), batch_size=BATCH
        )

    def add(self, step: Step) -> None:
        """Store a step of the environment."""
        self._buffer.add(TensorDict({name: torch.as_tensor(value) for name, value in step.items()}))

    def sample(self) -> Any:
        """Return random steps."""
        return self._buffer.sample()


class Loop:
    """A DQN that learns CartPole from a buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._env = gymnasium.make("CartPole-v1")
        self._state, _ = self._env.reset(seed=0)
        self._random = np.random.default_rng(0)
        torch.manual_seed(0)
        self._network, self._target = (
            torch.nn.Sequential(
                torch.nn.Linear(4, 120), torch.nn.ReLU(), torch.nn.Linear(120, 84), torch.nn.ReLU(),
                torch.nn.Linear(84, 2),
            )
            for _ in range(2)
        )  # fmt: skip
        self._target.load_state_dict(self._network.state_dict())
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=2.5e-4)
        self._frames = 0

    def run(self, frames: int) -> None:
        """Play and learn for so many frames."""
        for _ in range(frames):
            self._play()
            self._frames += 1
            if self._frames >= BATCH and self._frames % TRAIN_EVERY == 0:
                self._learn()
            if self._frames % TARGET_EVERY == 0:
                self._target.load_state_dict(self._network.state_dict())

    def _play(self) -> None:
        state = self._state
        if self._random.random() < 0.05:
            action = int(self._random.integers(2))
        else:
            with torch.no_grad():
                action = int(self._network(torch.from_numpy(state)).argmax())
        after, reward, terminated, truncated, _ = self._env.step(action)
        self._buffer.add({
            "state": state, "after": after, "action": np.int64(action), "reward": np.float32(reward),
            "terminated": terminated,
        })  # fmt: skip
        self._state = self._env.reset()[0] if terminated or truncated else after

    def _learn(self) -> None:
        batch = self._buffer.sample()
        with torch.no_grad():
            best = self._target(batch["after"]).amax(1)
            wanted = batch["reward"] + GAMMA * best * ~batch["terminated"]
        values = self._network(batch["state"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        loss = functional.mse_loss(wanted, values)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def dqn(rows: int, watch: Watch) -> Claims:
    """Frames of the loop, with each buffer."""
    ours = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(rows), batch_size=BATCH)
    made: dict[str, Buffer] = {"ours": ours, "NumPy": NumpyRing(rows)}
    if peers.buffers is not None:
        made["TorchRL"] = PeerBuffer(rows)
    jobs: dict[str, Job] = {name: functools.partial(Loop(buffer).run, FRAMES) for name, buffer in made.items()}
    found = watch.medians(f"{FRAMES} frames", jobs)
    yield from Claim.of("DQN on CartPole, with a NumPy ring", found, 0.9, peer="NumPy")
    yield from Claim.of("DQN on CartPole, with TorchRL", found, 1.5)


if __name__ == "__main__":
    main(__doc__, (dqn,), rows=10_000)
