"""Which leaves there must be, and what they must look like."""

from __future__ import annotations

from collections.abc import Iterator

from ..keys import ACTION, FLAGS, NEXT, REWARD, SINGLETONS, key_name
from .rules import Finding, Rule

__all__ = ["SchemaRule", "SingletonRule"]


class SchemaRule(Rule):
    """Reward and the three flags lie under `next`, flags are bool, there is an action and an observation."""

    rule_id = "TED001"
    name = "schema"

    def findings(self) -> list[Finding]:
        """Report what is missing or of the wrong type."""
        return list(self._findings())

    def _findings(self) -> Iterator[Finding]:
        fields = {field.key: field for field in self.fields}
        for key in (*FLAGS, REWARD):
            if (NEXT, *key) not in fields:
                yield self.report("error", f"there is no {key_name((NEXT, *key))!r}")
        for key in FLAGS:
            for place in (key, (NEXT, *key)):
                if place in fields and fields[place].dtype != "bool":
                    yield self.report("error", f"{key_name(place)!r} is {fields[place].dtype}, bool is expected")
        if not any(key[:1] == ACTION for key in fields):
            yield self.report("error", "there is no 'action'")
        for key in fields:
            if key[0] == "observation" and (NEXT, *key) not in fields:
                yield self.report("error", f"{key_name(key)!r} has no counterpart under 'next'")
        if not any(key[0] == NEXT and key[1:] not in SINGLETONS for key in fields):
            yield self.report("error", "nothing under 'next' says what was observed after the action")


class SingletonRule(Rule):
    """Reward and flags carry a trailing dimension of one, so that they have as many dimensions as the rest."""

    rule_id = "TED002"
    name = "singleton dimensions"

    def findings(self) -> list[Finding]:
        """Report the leaves without it."""
        wanted = {*SINGLETONS, *((NEXT, *key) for key in SINGLETONS)}
        return [
            self.report("error", f"{field.name!r} has rows of shape {list(field.shape)}, a trailing 1 is expected")
            for field in self.fields
            if field.key in wanted and field.shape[-1:] != (1,)
        ]
