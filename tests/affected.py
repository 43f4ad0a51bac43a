"""Prints the test files that the change since BASE can break: `python -m tests.affected [BASE]`.

These are the test files that import a changed module, directly or through others, the tests of each changed room, and
the tests named in `READERS` for files that are not Python. BASE defaults to `origin/main`, or `main` without a remote;
uncommitted and untracked files count. Tests of the running service are not listed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = ("serve_app", "deployments", "dashboards", "bench", "tests")
# Tests that read files which no module imports, by the beginning of the path.
READERS = {
    "cluster/": ["tests/cluster", "tests/cli"],
    "dashboards/": ["tests/dashboards", "tests/cli"],
    "serve_app/boards/": ["tests/dashboards", "tests/cli"],
    "serve_app/console/": ["tests/console"],
    "serve_app/engine/": ["tests/engine"],
    "serve_app/accounting/": ["tests/accounting"],
    "docs/": ["tests/api", "tests/cli", "tests/clients", "tests/cluster", "tests/dashboards", "tests/gateway"],
    "README.md": ["tests/cli", "tests/cluster"],
    "config.yaml": ["tests/deployments", "tests/launch", "tests/cluster"],
    "pyproject.toml": ["tests/cluster", "tests/launch"],
    "constraints.txt": ["tests/cluster", "tests/launch"],
    "tests/faults/": ["tests/faults"],
    "tests/clients/": ["tests/clients"],
}
LEFT_OUT = "tests/service"


def changed(base: str) -> list[str]:
    """Paths that differ between the working tree and where it left `base`."""
    fork = _git("merge-base", base, "HEAD")[0]
    return sorted({*_git("diff", "--name-only", fork), *_git("ls-files", "--others", "--exclude-standard")})


def affected(paths: Iterable[str], graph: grimp.ImportGraph) -> list[str]:
    """The test files and folders that `paths` can break, sorted; no file below a folder that is listed too."""
    found: set[str] = set()
    for path in paths:
        for start, tests in READERS.items():
            if path.startswith(start) and not path.endswith(".py"):
                found.update(tests)
        if not path.endswith(".py"):
            continue
        module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        if module in graph.modules:
            downstream = graph.find_downstream_modules(module) | {module}
            found.update(_file(name) for name in downstream if _is_test(name))
        if (room := ROOT / "tests" / path.split("/")[1 if path.startswith("serve_app/") else 0]).is_dir():
            found.add(str(room.relative_to(ROOT)))
    existing = {path for path in found if (ROOT / path).exists() and not path.startswith(LEFT_OUT)}
    return sorted(path for path in existing if not any(path.startswith(f"{other}/") for other in existing))


def build_graph() -> grimp.ImportGraph:
    """The imports of the project, in which each test file imports the conftest.py of its folder and of all above."""
    graph = grimp.build_graph(*PACKAGES)
    for name in graph.modules:
        if _is_test(name):
            parts = name.split(".")[:-1]
            for depth in range(len(parts)):
                conftest = ".".join([*parts[: depth + 1], "conftest"])
                if conftest in graph.modules:
                    graph.add_import(importer=name, imported=conftest)
    return graph


def _is_test(module: str) -> bool:
    return module.startswith("tests.") and module.rpartition(".")[2].startswith("test_")


def _file(module: str) -> str:
    return module.replace(".", "/") + ".py"


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def _base() -> str:
    known = subprocess.run(["git", "rev-parse", "--verify", "-q", "origin/main"], cwd=ROOT, capture_output=True)
    return "main" if known.returncode else "origin/main"


def main(arguments: list[str]) -> int:
    paths = changed(arguments[0] if arguments else _base())
    print(" ".join(affected(paths, build_graph())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
