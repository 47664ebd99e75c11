"""`rbtool record`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..core.verbs.options import RecordOptions
from .help import Example
from .options import OptionGroup, show_published, verb
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


@verb("record", EXAMPLES)
def record(
    env_id: Annotated[str, typer.Argument(metavar="ENV_ID", help="A gymnasium environment, or MODULE:ENV_ID.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write.")],
    *,
    out: Output,
    options: Annotated[dict[str, Any], OptionGroup.of(RecordOptions)],
) -> None:
    """Run a policy in a gymnasium environment and record its episodes.

    Each episode is saved when it ends: Ctrl-C or a crash loses at most the current one, and --resume continues.
    """
    from ..core.verbs.record import record as run

    result = out.run(run, env_id, dest, **options)
    show_published(out, result, dest)
