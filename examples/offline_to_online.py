"""Offline to online: DQN on batches that mix a dataset with a live ring, the dataset less and less.

By chance (--ring-only), a car in a valley hardly ever gets up the hill before step 200, where episodes are truncated.
"""

import argparse
import itertools
import tempfile

import gymnasium
import torch
from tensordict import TensorDict
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rbtool

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=3000, help="steps of the environment (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--plot", metavar="FILE", help="write the learning curve to an SVG or PNG file")
parser.add_argument("--ring-only", action="store_true", help="train without the dataset, for comparison")


def play(policy, seeds):
    """Play an episode of MountainCar for each seed; yield a row for each step."""
    env = gymnasium.wrappers.RescaleObservation(gymnasium.make("MountainCar-v0"), -1, 1)
    for seed in seeds:
        observation, done = env.reset(seed=seed)[0], False
        while not done:
            action = int(policy(torch.from_numpy(observation)))
            after, reward, terminated, truncated, _ = env.step(action)
            outcome = {"observation": after, "reward": [reward], "terminated": [terminated], "truncated": [truncated]}
            yield TensorDict({"observation": observation, "action": action, "next": outcome})
            observation, done = after, terminated or truncated


def main(options, folder):
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the network is too small for more
    push = lambda seen: 2 * (seen[1] > 0) if torch.rand(()) > 0.3 else torch.randint(3, ())
    recording = rbtool.PackedStorage.create(f"{folder}/episodes")
    rbtool.TensorDictReplayBuffer(storage=recording).extend(torch.stack([*play(push, seeds=range(20))]))
    recording.finish()
    dataset = rbtool.load_dataset(recording.path, batch_size=64, seed=options.seed)
    replay = rbtool.OfflineToOnlineReplayBuffer(dataset, online_capacity=10_000, batch_size=64, schema="intersect")
    network = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
    target = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    policy = lambda seen: network(seen).argmax() if torch.rand(()) > epsilon else torch.randint(3, ())
    live, curve = play(policy, seeds=itertools.count(options.seed)), {}
    for step in range(0, options.steps + 1, 8):
        epsilon = max(0.05, 1 - 2 * step / options.steps)
        replay.extend(torch.stack([*itertools.islice(live, 8)]))
        replay.anneal(options.steps if options.ring_only else step, total_steps=options.steps)
        for _ in range(8):
            batch = replay.sample()
            value = target(batch["next", "observation"]).amax(-1, keepdim=True)
            goal = batch["next", "reward"] + 0.99 * ~batch["next", "terminated"] * value
            chosen = network(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
            optimiser.zero_grad()
            nn.functional.huber_loss(chosen, goal).backward()
            optimiser.step()
            target.update_parameters(network)
        if step * 6 % options.steps < 48 or step + 8 > options.steps:
            rows = play(lambda seen: network(seen).argmax(), seeds=range(1000, 1005))
            curve[step] = sum(row["next", "reward"].item() for row in rows) / 5
    print(f"mean return {rbtool.inspect(recording.path).returns.mean:.1f} in the dataset, {curve[step]:.1f} in the end")
    if options.plot:
        import matplotlib.pyplot as plt

        plt.plot(*zip(*curve.items(), strict=True), marker=".")
        plt.gca().set(xlabel="steps of the environment", ylabel="mean return of 5 episodes")
        plt.savefig(options.plot)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args(), folder)
