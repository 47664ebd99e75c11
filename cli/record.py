"""`rbtool record`."""

from __future__ import annotations

from typing import Annotated

import typer

from .help import Example
from .options import show_published, verb
from .output import Output

EXAMPLES = (
    Example("rbtool record CartPole-v1 ./random --episodes 20 --seed 0", "random actions"),
    Example(
        "echo 'def act(observation): return int(observation[2] > 0)' > policy.py"
        " && rbtool record CartPole-v1 ./balanced --episodes 5 --policy policy.py:act --max-steps 100",
        "a policy of your own: a function of the observation",
    ),
    Example(
        "rbtool record CartPole-v1 ./faster --episodes 8 --num-envs 2", "two environments in processes of their own"
    ),
)


def add(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    verb(app, "record", EXAMPLES)(record)


def record(
    env_id: Annotated[str, typer.Argument(metavar="ENV_ID", help="A gymnasium environment, or MODULE:ENV_ID.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write.")],
    *,
    out: Output,
    episodes: Annotated[int, typer.Option("--episodes", metavar="N", help="How many episodes to record.")],
    policy: Annotated[
        str,
        typer.Option(
            "--policy", metavar="random|FILE.py:NAME", help="Actions: random, or a function of the observation."
        ),
    ] = "random",
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Episode k is reset with the seed N + k. Default: drawn.")
    ] = None,
    num_envs: Annotated[
        int, typer.Option("--num-envs", metavar="K", help="Environments in parallel; the episodes stay the same.")
    ] = 1,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", metavar="N", help="Truncate episodes after so many steps.")
    ] = None,
    render: Annotated[bool, typer.Option("--render", help="Record the rendered frames, as pixels.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a recording that was interrupted.")] = False,
) -> None:
    """Run a policy in a gymnasium environment and record its episodes.

    Each episode is safe when it ends: Ctrl-C or a crash keeps all before it, and --resume continues them.
    """
    from ..core.verbs.record import record as run

    with out.progress() as progress:
        result = run(
            env_id, dest, episodes=episodes, policy=policy, seed=seed, num_envs=num_envs, max_steps=max_steps,
            render=render, resume=resume, progress=progress,
        )  # fmt: skip
    show_published(out, result, dest)
