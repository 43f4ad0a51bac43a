"""Agent frameworks, evaluation tools and coding agents, as their users run them.

`make test-long` installs the Python packages of requirements.txt into .programs and those of package.json beside it.
The files beside this one are no test files of the suite.
"""

from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "tests" / "clients" / "programs"
PYTHON = ROOT / ".programs" / "venv" / "bin" / "python"
NODE = PROGRAMS / "node_modules" / ".bin"
