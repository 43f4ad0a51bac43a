"""Attempts at passwords are bounded by e-mail and by address, whatever else is tried meanwhile."""

from __future__ import annotations

from serve_app.console.attempts import MAX_KEPT, OF_ADDRESS, OF_EMAIL, WINDOW_S, Attempts

VICTIM = "ada@example.org"


def test_refused_attempts_leave_nothing_and_push_nobody_out() -> None:
    attempts = Attempts(lambda: 0.0)
    assert all(attempts.begin(f"guesser {number}", VICTIM) for number in range(OF_EMAIL))
    assert all(attempts.begin("blocked", f"first{number}@example.org") for number in range(OF_ADDRESS))
    kept = len(attempts._of_emails)
    assert not any(attempts.begin("blocked", f"more{number}@example.org") for number in range(2 * MAX_KEPT))
    assert len(attempts._of_emails) == kept
    assert not attempts.begin("another", VICTIM)


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    attempts = Attempts(lambda: 0.0)
    for number in range(MAX_KEPT):
        assert attempts.begin(f"address {number}", f"{number}@example.org")
    assert all(attempts.begin(f"guesser {number}", VICTIM) for number in range(OF_EMAIL))
    assert not attempts.begin("another", VICTIM)
    assert len(attempts._of_emails) == len(attempts._of_addresses) == MAX_KEPT


def test_after_the_window_and_after_a_success_it_begins_anew() -> None:
    now = 0.0
    attempts = Attempts(lambda: now)
    for _ in range(OF_EMAIL):
        assert attempts.begin("here", VICTIM)
    assert not attempts.begin("here", f" {VICTIM.upper()} ")
    attempts.succeeded(VICTIM)
    assert attempts.begin("here", VICTIM)
    for _ in range(OF_EMAIL - 1):
        assert attempts.begin("here", VICTIM)
    assert not attempts.begin("here", VICTIM)
    now = WINDOW_S
    assert attempts.begin("here", VICTIM)
