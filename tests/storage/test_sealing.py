"""Tests that a sealed secret opens only for its purpose and under the same secret key."""

from __future__ import annotations

import pytest

from serve_app.storage.sealing import SecretKeys, is_current, of_totp, of_webhooks, seal, unseal

KEY, OTHER = SecretKeys(b"a secret key"), SecretKeys(b"another secret key")


def test_a_secret_comes_back_and_looks_different_each_time() -> None:
    first, second = (seal("whsec_ü", KEY, of_webhooks("acct_1")) for _ in range(2))
    assert first != second
    assert "whsec" not in first
    assert unseal(first, KEY, of_webhooks("acct_1")) == unseal(second, KEY, of_webhooks("acct_1")) == "whsec_ü"


@pytest.mark.parametrize(
    ("key", "purpose"), [(OTHER, of_totp("user_1")), (KEY, of_totp("user_2")), (KEY, of_webhooks("user_1"))]
)
def test_it_opens_nowhere_else(key: SecretKeys, purpose: str) -> None:
    with pytest.raises(ValueError, match="SERVE_APP_SECRET_KEY"):
        unseal(seal("secret", KEY, of_totp("user_1")), key, purpose)


def test_one_changed_character_is_found() -> None:
    sealed = seal("secret", KEY, "")
    with pytest.raises(ValueError, match="does not open"):
        unseal(sealed[:-6] + ("AAAAAA" if sealed[-6:] != "AAAAAA" else "BBBBBB"), KEY, "")


def test_while_two_secrets_are_valid_a_secret_opens_under_either() -> None:
    both = SecretKeys(OTHER.current, KEY.current)
    before, now, after = seal("secret", KEY, ""), seal("secret", both, ""), seal("secret", OTHER, "")
    assert [unseal(one, both, "") for one in (before, now, after)] == 3 * ["secret"]
    assert [unseal(now, key, "") for key in (KEY, both, OTHER)] == 3 * ["secret"]
    assert [is_current(one, both, "") for one in (before, now, after)] == [False, True, True]


def test_what_the_secret_before_opens_is_not_current_when_that_is_gone() -> None:
    now, after = seal("secret", SecretKeys(OTHER.current, KEY.current), ""), seal("secret", OTHER, "")
    assert [is_current(one, OTHER, "") for one in (now, after)] == [False, True]
    assert is_current(now, KEY, "")  # by a process that does not know the newer one yet


def test_what_is_sealed_under_two_secrets_opens_under_no_third() -> None:
    both = SecretKeys(OTHER.current, KEY.current)
    with pytest.raises(ValueError, match="does not open"):
        unseal(seal("secret", both, ""), SecretKeys(b"a third secret key"), "")
    with pytest.raises(ValueError, match="does not open"):
        unseal(seal("secret", both, of_totp("user_1")), both, of_totp("user_2"))
