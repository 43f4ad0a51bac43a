"""A benchmark imports the harness, the simulation and itself, and no other benchmark and no tests."""

from __future__ import annotations

import ast
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def imported(path: Path) -> set[str]:
    """Full names of modules, as far as `import` statements show them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_a_benchmark_imports_only_the_harness_and_itself() -> None:
    paths = sorted(BENCH.rglob("*.py"))
    assert len(paths) > 50
    for path in paths:
        own = path.relative_to(BENCH).parts[0]
        allowed = {"harness", "simulation", own.removesuffix(".py")}
        for name in imported(path):
            room, _, rest = name.partition(".")
            assert room != "tests", (path, name)
            assert room != "bench" or rest.split(".")[0] in allowed, (path, name)
