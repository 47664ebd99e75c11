"""A decision transformer on sequences of a dataset: it learns short ways across a grid from random walks alone.

Each step of a sequence has the discounted return that follows in the whole walk; walks that are truncated before they
arrive have 0. Asked for the return of the shortest way, the network goes it. After Chen et al., 2021.
"""

import argparse
import tempfile

import gymnasium
import torch
from tensordict import TensorDict
from torch import nn
from torch.utils.data import DataLoader

import rbtool

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=600, help="gradient steps (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--plot", metavar="FILE", help="write the learning curve to an SVG or PNG file")
GRID, GAMMA, CONTEXT = ["SFFFF", "FFFFF", "FFFFF", "FFFFF", "FFFFG"], 0.9, 8


def play(policy, seeds):
    """Walk from S to G, where the reward is 1, or for 40 steps, for each seed; yield a row for each step."""
    env = gymnasium.make("FrozenLake-v1", desc=GRID, is_slippery=False, max_episode_steps=40)
    for seed in seeds:
        cells, done = [env.reset(seed=seed)[0]], False
        while not done:
            action = int(policy(torch.tensor([cells])))
            after, reward, terminated, truncated, _ = env.step(action)
            outcome = {"observation": after, "reward": [reward], "terminated": [terminated], "truncated": [truncated]}
            yield TensorDict({"observation": cells[-1], "action": action, "next": outcome})
            cells, done = [*cells, after], terminated or truncated


class DecisionTransformer(nn.TransformerEncoder):
    def __init__(self, width=64):
        super().__init__(nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True), num_layers=2)
        self.togo, self.cell, self.position = nn.Linear(1, width), nn.Embedding(25, width), nn.Embedding(CONTEXT, width)
        self.action = nn.Linear(width, 4)

    def forward(self, togo, cells):
        tokens = self.togo(togo) + self.cell(cells) + self.position.weight[: cells.shape[1]]
        return self.action(super().forward(tokens, nn.Transformer.generate_square_subsequent_mask(cells.shape[1])))


def main(options, folder):
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the network is too small for more
    walks = rbtool.PackedStorage.create(f"{folder}/walks")
    rbtool.TensorDictReplayBuffer(storage=walks).extend(
        torch.stack([*play(lambda _: torch.randint(4, ()), range(300))])
    )
    walks.finish()
    rbtool.preprocess(walks.path, dest=f"{folder}/data", operations={"return_to_go": True, "gamma": GAMMA})
    sampler = rbtool.SliceSampler(slice_len=CONTEXT, weight="step", batched=True)  # no walk is shorter
    data = rbtool.torch_dataset(
        f"{folder}/data", 64 * CONTEXT, sampler=sampler, seed=options.seed, batches=options.steps
    )
    network, curve = DecisionTransformer(), {0: len(data.buffer) / 300}
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)

    @torch.no_grad()
    def shortest(cells):  # asks for the return of 8 steps
        togo = GAMMA ** (7.0 - torch.arange(cells.shape[1])).clamp(min=0)[None, -CONTEXT:, None]
        return torch.distributions.Categorical(logits=network(togo, cells[:, -CONTEXT:])[0, -1]).sample()

    for step, batch in enumerate(DataLoader(data, batch_size=None), 1):  # workers would yield the same batches
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(batch["return_to_go"], batch["observation"]).mT, batch["action"]).backward()
        optimiser.step()
        if step * 6 % options.steps < 6:
            curve[step] = sum(1 for _ in play(shortest, seeds=range(10))) / 10
    print(f"steps of a walk {curve[0]:.1f} at random, {curve[step]:.1f} after {step} gradient steps, 8 at best")
    if options.plot:
        import matplotlib.pyplot as plt

        plt.plot(*zip(*curve.items(), strict=True), marker=".")
        plt.gca().set(xlabel="gradient steps", ylabel="mean steps of 10 walks")
        plt.savefig(options.plot)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args(), folder)
