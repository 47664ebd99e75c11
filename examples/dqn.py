"""DQN with prioritized replay on a live ring: CartPole, with targets over five steps.

The priority of a row is the error of the network when it last saw the row; new rows have the highest one. Targets are
bootstrapped where an episode is truncated, and not where it terminates.
"""

import argparse
import itertools

import gymnasium
import torch
from tensordict import TensorDict
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rbtool

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=8000, help="steps of the environment (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--plot", metavar="FILE", help="write the learning curve to an SVG or PNG file")


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


def mean_return(policy):
    return sum(row["next", "reward"].item() for row in play(policy, seeds=range(1000, 1010))) / 10


def main(options):
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the network is too small for more
    network = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    target = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    ring, n_step = rbtool.LazyTensorStorage(10_000), rbtool.MultiStepTransform(n_steps=5, gamma=0.99)
    replay = rbtool.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=ring, transform=n_step)
    policy = lambda seen: network(seen).argmax() if torch.rand(()) > epsilon else torch.randint(2, ())
    live, curve = play(policy, seeds=itertools.count(options.seed)), {0: mean_return(lambda _: torch.randint(2, ()))}
    for step in range(8, options.steps + 1, 8):
        epsilon = max(0.05, 1 - 4 * step / options.steps)
        replay.extend(torch.stack([*itertools.islice(live, 8)]))
        for _ in range(4 if step > 400 else 0):
            batch = replay.sample(64)
            after, discount = batch["next", "observation"], batch["gamma"].unsqueeze(-1)  # over up to five steps
            with torch.no_grad():
                value = target(after).gather(-1, network(after).argmax(-1, keepdim=True))
                goal = batch["next", "reward"] + discount * ~batch["multi_step", "terminated"] * value
            chosen = network(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
            losses = nn.functional.huber_loss(chosen, goal, reduction="none").squeeze(-1)
            optimiser.zero_grad()
            (batch["priority_weight"] * losses).mean().backward()
            optimiser.step()
            replay.update_tensordict_priority(batch.set("td_error", (goal - chosen.detach()).abs()))
            target.update_parameters(network)
        if step * 10 % options.steps < 80 or step + 8 > options.steps:
            curve[step] = mean_return(lambda seen: network(seen).argmax())
    print(f"mean return {curve[0]:.1f} at random, {curve[step]:.1f} after {step} steps")
    if options.plot:
        import matplotlib.pyplot as plt

        plt.plot(*zip(*curve.items(), strict=True), marker=".")
        plt.gca().set(xlabel="steps of the environment", ylabel="mean return of 10 episodes")
        plt.savefig(options.plot)


if __name__ == "__main__":
    main(parser.parse_args())
