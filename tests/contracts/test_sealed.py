"""What is sealed opens for whom it was sealed, under the same key secret, and in no other place."""

from __future__ import annotations

import pytest

from serve_app.contracts.key_format import KeySecrets
from serve_app.contracts.sealed import of_totp, of_webhooks, seal, unseal

KEY, OTHER = KeySecrets(b"a key secret"), KeySecrets(b"another key secret")


def test_a_secret_comes_back_and_looks_different_each_time() -> None:
    first, second = (seal("whsec_ü", KEY, of_webhooks("acct_1")) for _ in range(2))
    assert first != second
    assert "whsec" not in first
    assert unseal(first, KEY, of_webhooks("acct_1")) == unseal(second, KEY, of_webhooks("acct_1")) == "whsec_ü"


@pytest.mark.parametrize(
    ("key", "purpose"), [(OTHER, of_totp("user_1")), (KEY, of_totp("user_2")), (KEY, of_webhooks("user_1"))]
)
def test_it_opens_nowhere_else(key: KeySecrets, purpose: str) -> None:
    with pytest.raises(ValueError, match="SERVE_APP_KEY_SECRET"):
        unseal(seal("secret", KEY, of_totp("user_1")), key, purpose)


def test_one_changed_character_is_found() -> None:
    sealed = seal("secret", KEY, "")
    with pytest.raises(ValueError, match="does not open"):
        unseal(sealed[:-6] + ("AAAAAA" if sealed[-6:] != "AAAAAA" else "BBBBBB"), KEY, "")


def test_what_was_stored_before_stays_as_it_is() -> None:
    assert unseal("JBSWY3DPEHPK3PXP", KEY, of_totp("user_1")) == "JBSWY3DPEHPK3PXP"
