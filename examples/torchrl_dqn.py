"""DQN with TorchRL's environment, actor, loss and collector, and with specs and a prioritized buffer of rbtool.

Nothing is converted: TorchRL takes the specs as they are, and its collector fills the buffer.
"""

import argparse

import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import ExplorationType, GymEnv, StepCounter, TransformedEnv, set_exploration_type
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

import rbtool

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=8000, help="steps of the environment (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0)


def cart_pole(seed):
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter())
    env.set_seed(seed)
    return env


def mean_return(policy=None):
    env = cart_pole(seed=1000)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        return sum(len(env.rollout(500, policy)) for _ in range(10)) / 10  # each step has a reward of 1


def main(options):
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the network is too small for more
    env, action = cart_pole(options.seed), rbtool.Categorical(2)
    assert env.action_spec == action  # TorchRL's and ours
    network = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    actor = QValueActor(network, spec=action, action_space="categorical")
    egreedy = EGreedyModule(action, eps_end=0.05, annealing_num_steps=options.steps // 4)
    replay = rbtool.TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=rbtool.LazyTensorStorage(10_000), batch_size=64
    )
    policy = TensorDictSequential(actor, egreedy)
    collector = Collector(
        env,
        policy,
        frames_per_batch=8,
        total_frames=options.steps,
        replay_buffer=replay,
        auto_register_policy_transforms=True,
    )
    loss = DQNLoss(actor, action_space=action, double_dqn=True, loss_function="smooth_l1")
    loss.make_value_estimator(gamma=0.99)
    target, optimiser = SoftUpdate(loss, tau=0.02), torch.optim.Adam(network.parameters(), lr=1e-3)
    before = mean_return()
    for _ in collector:
        egreedy.step(8)
        for _ in range(4 if len(replay) > 400 else 0):
            batch = replay.sample()
            value = loss(batch)["loss"]  # weighted, and the errors are written into the batch
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            replay.update_tensordict_priority(batch)
            target.step()
    print(f"mean return {before:.1f} at random, {mean_return(actor):.1f} after {options.steps} steps")


if __name__ == "__main__":
    main(parser.parse_args())
