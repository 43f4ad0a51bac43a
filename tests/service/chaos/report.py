"""The result of a run, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Report:
    """One run."""

    mode: str
    seed: int
    seconds: float
    shape: dict[str, Any]
    problems: list[str] = field(default_factory=list)  # empty: everything held
    disturbances: dict[str, int] = field(default_factory=dict)  # by kind
    answers: dict[str, int] = field(default_factory=dict)  # what clients got, by kind
    figures: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"ok": not self.problems, **asdict(self)}

    def text(self) -> str:
        """For a terminal."""
        lines = [f"{self.mode}, {self.seconds:.0f} s, seed {self.seed}: {_pairs(self.shape)}"]
        for title, values in (
            ("killed", self.disturbances),
            ("answers", self.answers),
            ("figures", self.figures),
        ):
            if values:
                lines += [f"  {title}", *(f"    {name:<44} {_shown(value)}" for name, value in values.items())]
        if self.problems:
            lines += [f"  {len(self.problems)} problem(s)", *(f"    {problem}" for problem in self.problems)]
        else:
            lines.append("  everything holds")
        return "\n".join(lines)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in ({}, None))


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
