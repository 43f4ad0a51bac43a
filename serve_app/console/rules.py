"""Who may open what: one row for each route. A route without a row can't be added."""

from __future__ import annotations

from typing import Final

ANYONE: Final = frozenset({"anyone"})
SIGNED_IN: Final = frozenset({"signed in"})
PROVIDER: Final = frozenset({"the payment provider"})  # by the signature of what it sends; no form, no session
EVERY_MEMBER: Final = frozenset({"owner", "member", "billing"})
KEY_HOLDERS: Final = frozenset({"owner", "member"})
PAYERS: Final = frozenset({"owner", "billing"})
OWNERS: Final = frozenset({"owner"})

#: Roles of operators, for routes that begin with /operator. Only an admin may change both money and limits.
OPERATORS: Final = frozenset({"admin", "support", "finance", "read-only"})
SUPPORT: Final = frozenset({"admin", "support"})
FINANCE: Final = frozenset({"admin", "finance"})

#: Other roles are those in the account that the path names.
RULES: Final = {
    "GET /static/console.css": ANYONE,
    "GET /static/playground.js": ANYONE,
    "GET /static/copy.js": ANYONE,
    "GET /sign-in": ANYONE,
    "POST /sign-in": ANYONE,
    "GET /sign-in/openid": ANYONE,
    "GET /sign-in/openid/return": ANYONE,
    "GET /invitations/{token}": ANYONE,
    "POST /invitations/{token}": ANYONE,
    "POST /invitations/{token}/openid": ANYONE,
    "POST /payments/{provider}": PROVIDER,
    "POST /invitations/{token}/join": SIGNED_IN,
    "GET /": SIGNED_IN,
    "POST /sign-out": SIGNED_IN,
    "GET /profile": SIGNED_IN,
    "POST /profile/password": SIGNED_IN,
    "POST /profile/totp": SIGNED_IN,
    "POST /profile/totp/off": SIGNED_IN,
    "POST /profile/openid": SIGNED_IN,
    "POST /profile/openid/off": SIGNED_IN,
    "POST /profile/sessions/{session_id}/end": SIGNED_IN,
    "GET /operator/accounts": OPERATORS,
    "GET /operator/accounts/{id}": OPERATORS,
    "POST /operator/accounts/{id}/limits": SUPPORT,
    "POST /operator/accounts/{id}/active": SUPPORT,
    "POST /operator/accounts/{id}/credit": FINANCE,
    "POST /operator/accounts/{id}/attempts/{attempt_id}/end": FINANCE,
    "GET /operator/credits": OPERATORS,
    "POST /operator/credits/{pending_id}/approve": FINANCE,
    "POST /operator/credits/{pending_id}/reject": FINANCE,
    "GET /operator/audit": OPERATORS,
    "GET /operator/books": OPERATORS,
    "GET /operator/live": OPERATORS,
    "GET /accounts/{account_id}": EVERY_MEMBER,
    "GET /accounts/{account_id}/docs": EVERY_MEMBER,
    "GET /accounts/{account_id}/keys": KEY_HOLDERS,
    "POST /accounts/{account_id}/keys": KEY_HOLDERS,
    "POST /accounts/{account_id}/keys/{key_id}/revoke": KEY_HOLDERS,
    "POST /accounts/{account_id}/keys/{key_id}/rotate": KEY_HOLDERS,
    "GET /accounts/{account_id}/playground": KEY_HOLDERS,
    "POST /accounts/{account_id}/playground/key": KEY_HOLDERS,
    "GET /accounts/{account_id}/playground/requests/{request_id}": KEY_HOLDERS,
    "GET /accounts/{account_id}/usage": EVERY_MEMBER,
    "GET /accounts/{account_id}/usage/{month}.csv": EVERY_MEMBER,
    "GET /accounts/{account_id}/requests": EVERY_MEMBER,
    "GET /accounts/{account_id}/billing": PAYERS,
    "POST /accounts/{account_id}/billing": PAYERS,
    "POST /accounts/{account_id}/billing/recharge": PAYERS,
    "POST /accounts/{account_id}/billing/recharge/method": PAYERS,
    "POST /accounts/{account_id}/billing/recharge/resume": PAYERS,
    "POST /accounts/{account_id}/billing/recharge/off": PAYERS,
    "GET /accounts/{account_id}/statements/{month}": PAYERS,
    "GET /accounts/{account_id}/alerts": PAYERS,
    "POST /accounts/{account_id}/alerts": PAYERS,
    "POST /accounts/{account_id}/alerts/{alert_id}/remove": PAYERS,
    "GET /accounts/{account_id}/management-keys": OWNERS,
    "POST /accounts/{account_id}/management-keys": OWNERS,
    "POST /accounts/{account_id}/management-keys/{key_id}/revoke": OWNERS,
    "GET /accounts/{account_id}/members": OWNERS,
    "POST /accounts/{account_id}/members": OWNERS,
    "POST /accounts/{account_id}/members/{user_id}": OWNERS,
    "POST /accounts/{account_id}/members/invitations/{invitation_id}/revoke": OWNERS,
}
