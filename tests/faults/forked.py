"""One run of pytest, forked from a process that has the libraries."""

from __future__ import annotations

import ast
import os
import sys
import tempfile
from pathlib import Path

PROJECT = ("serve_app", "deployments", "dashboards", "bench", "tests")
NOT_PRELOADED = ("ray", "vllm", "grpc", "schemathesis", "selenium")  # they start threads, or cost more than they save


def run_pytest(tree: Path, scratch: Path, output: Path, tests: list[str], keep_compiled: bool) -> None:
    """Runs pytest on a copy, in a forked process that has the libraries but none of the project's modules."""
    os.setsid()
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(target, stream)
    root = str(Path(__file__).parents[2])
    for name in [name for name in sys.modules if name.partition(".")[0] in PROJECT]:
        del sys.modules[name]
    os.chdir(tree)
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", root))]
    sys.dont_write_bytecode = not keep_compiled
    os.environ |= {"PYTHONPATH": str(tree), "TMPDIR": str(scratch)}
    os.environ |= {} if keep_compiled else {"PYTHONDONTWRITEBYTECODE": "1"}
    tempfile.tempdir = None
    import pytest

    # schemathesis takes 2 s to import.
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", *tests])))


def libraries(root: Path) -> list[str]:
    """The modules outside the project that its code imports."""
    found = set()
    for name in ("serve_app", "tests"):
        for path in (root / name).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    found.add(node.module)
    return sorted(name for name in found if name.partition(".")[0] not in (*PROJECT, *NOT_PRELOADED))
