"""Behaviour cloning on a dataset: a network imitates a CartPole controller that acts at random 4 times out of 10.

The cloned policy takes the likeliest action: the noise averages out, and the pole stays up longer than in the dataset.
"""

import argparse
import tempfile

import gymnasium
import torch
from tensordict import TensorDict
from torch import nn

import rbtool

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=1000, help="gradient steps (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--plot", metavar="FILE", help="write the learning curve to an SVG or PNG file")
parser.add_argument("--dataset", help="a path, or a name like minari:cartpole/demo-v0 (default: record 40 episodes)")


def play(policy, seeds):
    """Play an episode of CartPole for each seed; yield a row for each step."""
    env = gymnasium.make("CartPole-v1")
    for seed in seeds:
        observation, done = env.reset(seed=seed)[0], False
        while not done:
            action = int(policy(torch.from_numpy(observation)))
            after, reward, terminated, truncated, _ = env.step(action)
            outcome = {"observation": after, "reward": [reward], "terminated": [terminated], "truncated": [truncated]}
            yield TensorDict({"observation": observation, "action": action, "next": outcome})
            observation, done = after, terminated or truncated


def controller(observation):
    """Push the cart under the falling pole, or act at random."""
    return torch.rand(()) < 0.5 if torch.rand(()) < 0.4 else observation[2] + 0.3 * observation[3] > 0


def main(options, folder):
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the network is too small for more
    dataset = options.dataset or f"{folder}/episodes"
    if not options.dataset:
        recording = rbtool.PackedStorage.create(dataset)
        rbtool.TensorDictReplayBuffer(storage=recording).extend(torch.stack([*play(controller, seeds=range(40))]))
        recording.finish()
    rbtool.split(dataset, f"{folder}/parts", train=0.8, val=0.2, seed=options.seed)  # divides no episode
    train = rbtool.load_dataset(f"{folder}/parts/train", batch_size=256, seed=options.seed)
    held_out = rbtool.load_dataset(f"{folder}/parts/val")[:]
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    loss_of = nn.CrossEntropyLoss()
    curve = {}
    for step in range(options.steps + 1):
        if step * 20 % options.steps < 20:
            with torch.no_grad():
                curve[step] = loss_of(network(held_out["observation"]), held_out["action"]).item()
        batch = train.sample()
        loss = loss_of(network(batch["observation"]), batch["action"])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    rows = play(lambda observation: network(observation).argmax(), seeds=range(1000, 1010))
    cloned = sum(row["next", "reward"].item() for row in rows) / 10
    print(f"held-out loss {curve[0]:.3f} before, {curve[step]:.3f} after {step} steps")
    print(f"mean return {rbtool.inspect(dataset).returns.mean:.1f} in the dataset, {cloned:.1f} of the clone")
    if options.plot:
        import matplotlib.pyplot as plt

        plt.plot(*zip(*curve.items(), strict=True), marker=".")
        plt.gca().set(xlabel="gradient steps", ylabel="held-out loss")
        plt.savefig(options.plot)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args(), folder)
