"""`rbtool schema`."""

from __future__ import annotations

from typing import Annotated

import typer

from .help import Example
from .options import verb
from .output import Output

EXAMPLES = (
    Example("rbtool schema check", "the schema of rbtool check --json"),
    Example("rbtool schema rules", "the schema of rbtool check --rules --json"),
)


@verb("schema", EXAMPLES)
def schema(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="The kind of document: for most verbs, their name.")],
    *,
    out: Output,
) -> None:
    """Print the JSON Schema of the document that a verb prints with --json."""
    from ..core.verbs.schema import schema as run

    out.document(dict(run(kind).document))
