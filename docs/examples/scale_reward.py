"""An operation for pipeline files: multiplies rewards by a factor."""

from dataclasses import dataclass
from typing import Any, ClassVar

from rbtool.core.errors import UsageError
from rbtool.core.preprocess.operations import BoundOperation, FieldChanges, Fields, LazyColumn, RowOperation
from rbtool.core.ted import Field


@dataclass(frozen=True)
class ScaleReward(RowOperation):
    """Multiplies `next.reward` by `factor`; its shape and dtype stay."""

    name: ClassVar[str] = "scale-reward"
    factor: float

    def __post_init__(self) -> None:
        if self.factor == 0:
            raise UsageError("the factor of scale-reward is 0, expected another number")

    def plan(self, fields: Fields) -> BoundOperation:
        return FieldChanges.of(fields, fields.covered("next.reward"), self.declared, self.scaled)

    def declared(self, field: Field) -> Field:
        return field

    def scaled(self, field: Field, column: LazyColumn) -> Any:
        return column.numbers * self.factor
