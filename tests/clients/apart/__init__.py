"""Programs that run outside the suite's own environment: they need other versions of packages, or Node.

`make test` installs both; the files beside this one are no test files of the suite.
"""

from pathlib import Path

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".clients" / "venv" / "bin" / "python"
NODE = ROOT / "tests" / "clients" / "node"
