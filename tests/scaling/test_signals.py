"""Tests of how a replica reports its load."""

from __future__ import annotations

import pytest

from serve_app.scaling.signals import QUEUED, ReplicaLoad


@pytest.mark.parametrize(("queued", "reported"), [(0, 0), (1023, 0), (1024, 1024), (5000, 4096), (8192, 8192)])
def test_waiting_tokens_are_reported_for_routing_in_rough_steps(queued: int, reported: int) -> None:
    assert ReplicaLoad(slots=8, queued_prefill_tokens=queued).routing_stats() == {QUEUED: reported}
