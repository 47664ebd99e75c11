"""A transform: Gaussian noise on observations, at the root and under `next`."""

import torch
from tensordict import TensorDictBase

from rbtool import Transform


class ObservationNoise(Transform):
    """Adds noise to what is sampled. The storage keeps the exact rows: batches are copied, never edited in place."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        noisy = data.copy()
        for key in ("observation", ("next", "observation")):
            noisy[key] = data[key] + self.scale * torch.randn_like(data[key])
        return noisy


class ClippedReward(Transform):
    """Clips rewards on the way in: the storage holds the clipped values."""

    def inv(self, data: TensorDictBase) -> TensorDictBase:
        clipped = data.copy()
        clipped["next", "reward"] = data["next", "reward"].clamp(-1, 1)
        return clipped
