"""The table of faults follows the code: each can be planted, and the tests that should catch it exist."""

from __future__ import annotations

import pytest

from .__main__ import ROOT, Fault, read_table


@pytest.mark.parametrize("fault", read_table(), ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_tests_exist(fault: Fault) -> None:
    assert fault.misfit() is None
    for test in fault.tests:
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in source
