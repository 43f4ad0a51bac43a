"""SECURITY.md names tests for each threat, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_threat_has_tests_that_exist() -> None:
    lines = (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()
    threats = [line for line in lines if line.startswith("| ") and not line.startswith("| who |")]
    assert threats
    for threat in threats:
        named = re.findall(r"`(tests/[\w/]+\.py)`", threat)
        assert named, threat
        assert [path for path in named if not (ROOT / path).is_file()] == []
