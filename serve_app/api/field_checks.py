"""Checks of a field's value. They annotate the field's declaration, next to its type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from serve_app.api.codec import describe_value
from serve_app.api.tools_and_formats import invalid


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a number, from `low` to `high`. It is not part of the type: a value outside causes 422, not 400."""

    low: float
    high: float | None  # None: the model's maximum output in tokens; infinity: no maximum
    above: bool = False  # whether `low` itself is excluded

    def check_value(self, field: str, value: float, most_output: int = 0) -> None:
        high = most_output if self.high is None else self.high
        if self.low <= value <= high and not (self.above and value == self.low):
            return
        allowed = f"above {self.low} and at most {high}" if self.above else f"from {self.low} to {high}"
        if high == inf:
            allowed = f"at least {self.low}"
        raise invalid(field, f"must be {allowed}, but it is {describe_value(value)}")

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        low = {"exclusiveMinimum" if self.above else "minimum": self.low}
        return {**handler(core), **low, **({} if self.high in (None, inf) else {"maximum": self.high})}


@dataclass(frozen=True, slots=True)
class OnlyWith:
    """Allows the field only if the field `flag` is true."""

    flag: str


@dataclass(frozen=True, slots=True)
class Check:
    """An additional check of a field that was sent. The function gets the value and the request; it raises ApiError."""

    function: Callable[[Any, Any], None]
