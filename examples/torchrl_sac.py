"""SAC with TorchRL's actor and losses, on an environment of one's own whose specs and buffer are rbtool's.

The environment swings up 8 pendulums at once. TorchRL checks it against its specs, which nobody converts.
"""

import argparse
import math

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs import EnvBase, ExplorationType, check_env_specs, set_exploration_type
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

import rbtool

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=8000, help="steps of all pendulums (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0)


class Pendulums(EnvBase):
    """Gymnasium's pendulum, 8 times: swing up and stay there, with a torque of at most 2; episodes of 200 steps."""

    def __init__(self):
        super().__init__(batch_size=[8])
        high = torch.tensor([1.0, 1.0, 8.0]).expand(8, 3)
        self.observation_spec = rbtool.Composite(
            observation=rbtool.Bounded(-high, high, (8, 3)),
            count=rbtool.Unbounded((8, 1), dtype=torch.int64),
            shape=[8],
        )
        self.action_spec = rbtool.Bounded(-2.0, 2.0, (8, 1))
        self.reward_spec = rbtool.Unbounded((8, 1))
        self.done_spec = rbtool.Composite(
            {flag: rbtool.Binary(1, (8, 1), dtype=torch.bool) for flag in ("done", "terminated", "truncated")},
            shape=[8],
        )

    def _set_seed(self, seed):
        self.random = torch.Generator().manual_seed(seed)

    def _reset(self, tensordict=None, **_):
        start = torch.rand(2, 8, 1, generator=self.random) * 2 - 1
        self.angle, self.speed = math.pi * start[0], start[1]
        return self._seen(torch.zeros(8, 1, dtype=torch.int64))

    def _step(self, tensordict):
        torque, angle = tensordict["action"], (self.angle + math.pi) % (2 * math.pi) - math.pi
        reward = -(angle**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        self.speed = (self.speed + 0.05 * (15 * angle.sin() + 3 * torque)).clamp(-8, 8)
        self.angle = angle + 0.05 * self.speed
        return self._seen(tensordict["count"] + 1).set("reward", reward)

    def _seen(self, count):
        observation = torch.cat([self.angle.cos(), self.angle.sin(), self.speed], -1)
        late = count >= 200
        flags = {"done": late, "truncated": late, "terminated": torch.zeros_like(late)}
        return TensorDict({"observation": observation, "count": count, **flags}, [8])


def layers(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers(4, 1)

    def forward(self, observation, action):
        return self.layers(torch.cat([observation, action], -1))


def mean_return(env, policy=None):
    env.set_seed(1000)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        return env.rollout(200, policy)["next", "reward"].sum(1).mean().item()


def main(options):
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the networks are too small for more
    env = Pendulums()
    env.set_seed(options.seed)
    check_env_specs(env)
    network = nn.Sequential(layers(3, 2), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.full_action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        default_interaction_type=ExplorationType.RANDOM,
    )
    critic = ValueOperator(Critic(), in_keys=["observation", "action"])
    loss = SACLoss(actor, critic, action_spec=env.action_spec, loss_function="l2")
    loss.make_value_estimator(gamma=0.98)
    target, optimiser = SoftUpdate(loss, tau=0.01), torch.optim.Adam(loss.parameters(), lr=1e-3)
    replay = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(50_000), batch_size=128)
    before, learning = mean_return(Pendulums()), Pendulums()
    env.set_seed(options.seed)
    state = env.reset()
    for step in range(0, options.steps, 8):
        with torch.no_grad():
            state = env.step(actor(state) if step > 800 else env.rand_action(state))
        replay.extend(state.exclude("loc", "scale"))  # which random actions do not have
        state = env.step_mdp(state) if not state["next", "done"].any() else env.reset()
        for _ in range(4 if step > 800 else 0):
            losses = loss(replay.sample())
            optimiser.zero_grad()
            sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
            optimiser.step()
            target.step()
    print(f"mean return {before:.1f} at random, {mean_return(learning, actor):.1f} after {options.steps} steps")


if __name__ == "__main__":
    main(parser.parse_args())
