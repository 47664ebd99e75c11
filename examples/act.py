"""ACT on a LeRobot folder: from a picture and its position, a robot predicts its next 16 actions and reaches a target.

A script that knows the target shows how, with a shaky hand; the policy has to see it. After Zhao et al., 2023, without
the latent variable, for which one way of doing the task is too few.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn

import rbtool

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=600, help="default: %(default)s; 0 ends after the demonstrations")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--plot", metavar="FILE", help="write the learning curve to an SVG or PNG file")
parser.add_argument("--lerobot", metavar="DIR", help="where demonstrations are or will be written")
CHUNK, SIZE = 16, 24


def seen(place, target):
    """Return what the robot observes: its position, and a picture of the target in red and of itself in green."""
    pixels = (torch.arange(SIZE) + 0.5) / SIZE
    near = [torch.exp(-(((spot[..., None] - pixels) / 0.06) ** 2)) for spot in (target, place)]
    red, green = (255 * one[:, 1, :, None] * one[:, 0, None, :] for one in near)
    return {"state": place, "image": {"top": torch.stack([red, green, torch.zeros_like(red)], -1).byte()}}


def play(policy, targets):
    """Move a robot to each target, up to 0.08 in each of 24 steps; yield the steps. An action is a position."""
    place = torch.full_like(targets, 0.5)
    for step in range(24):
        observation = seen(place, targets)
        way = (action := policy(step, observation)) - place
        place = place + way * (0.08 / way.norm(dim=-1, keepdim=True)).clamp(max=1)
        end = torch.full((len(targets), 1), step == 23)
        after = {"observation": seen(place, targets), "truncated": end, "terminated": torch.zeros_like(end)}
        yield TensorDict({"observation": observation, "action": action, "next": after}, [len(targets)])


def demonstrate(folder, path):
    """Write 100 episodes as a LeRobot folder."""
    targets, recording = torch.rand(100, 2) * 0.8 + 0.1, rbtool.PackedStorage.create(f"{folder}/recording")
    steps = torch.stack([*play(lambda *_: targets + 0.02 * torch.randn_like(targets), targets)], 1)
    rbtool.TensorDictReplayBuffer(storage=recording).extend(steps.flatten())
    recording.finish()
    rbtool.export(f"{folder}/recording", path, to="lerobot", fps=10)


class ACT(nn.Module):
    def __init__(self, stats, width=64):
        super().__init__()
        for name, field in ("state", stats["observation", "state"]), ("action", stats["action",]):
            self.register_buffer(f"{name}_mean", torch.tensor(field.mean))
            self.register_buffer(f"{name}_std", torch.tensor(field.std))
        camera = nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16 * (SIZE // 4) ** 2, 4 * width)
        self.camera, self.state = nn.Sequential(*camera, nn.Unflatten(1, (4, width))), nn.Linear(2, width)
        self.kinds, self.queries = (nn.Parameter(torch.randn(count, width)) for count in (5, CHUNK))
        self.transformer = nn.Transformer(width, 4, 2, 1, 128, dropout=0.0, batch_first=True)
        self.action = nn.Linear(width, 2)

    def forward(self, observation):
        image = self.camera(observation["image"]["top"].movedim(-1, -3) / 255 - 0.5)
        state = self.state((observation["state"] - self.state_mean) / self.state_std)
        tokens = torch.cat([image, state[:, None]], 1) + self.kinds
        chunk = self.action(self.transformer(tokens, self.queries.expand(len(tokens), -1, -1)))
        return chunk * self.action_std + self.action_mean


@torch.no_grad()
def success(network):
    """Return for how many of 200 new targets, in per cent, the robot ends within 0.05 of it."""
    targets, chunk = torch.rand(200, 2, generator=torch.Generator().manual_seed(1)) * 0.8 + 0.1, []

    def policy(step, observation):  # looks again after half a chunk
        chunk[:] = chunk[1:] if step % (CHUNK // 2) else network(observation).unbind(1)
        return chunk[0]

    *_, last = play(policy, targets)
    return (last["next", "observation", "state"] - targets).norm(dim=-1).lt(0.05).float().mean().item() * 100


def main(options, folder):
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the network is too small for more
    path, dataset = options.lerobot or f"{folder}/reach", f"{folder}/dataset"
    if not Path(path).exists():
        demonstrate(folder, path)
    if not options.steps:
        return
    torch.manual_seed(options.seed)  # the same policy, whether or not the demonstrations were there
    rbtool.convert(path, dataset)
    steps = rbtool.torch_dataset(dataset, batch_size=64, seed=options.seed, windows={"action": (0, CHUNK)})
    network, loader = ACT({field.key: field for field in rbtool.stats(dataset).fields}), rbtool.TorchLoader(steps)
    optimiser, curve = torch.optim.AdamW(network.parameters(), lr=2e-3), {0: success(network)}
    batches = (batch for _ in range(options.steps) for batch in loader)  # each epoch in another order
    for step, batch in zip(range(1, options.steps + 1), batches, strict=False):
        error = (network(batch["observation"]) - batch["action"]).abs() / network.action_std
        loss = error[~batch["is_pad", "action"]].mean()  # nothing is learned from steps beyond the end
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        optimiser.param_groups[0]["lr"] = 2e-3 * (1 - step / options.steps)
        if step * 12 % options.steps < 12:
            curve[step] = success(network)
    print(f"success {curve[0]:.1f} % before, {curve[step]:.1f} % after {step} steps")
    if options.plot:
        import matplotlib.pyplot as plt

        plt.plot(*zip(*curve.items(), strict=True), marker=".")
        plt.gca().set(xlabel="gradient steps", ylabel="reached targets, %")
        plt.savefig(options.plot)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args(), folder)
