"""Sets of roles that may open a page."""

from __future__ import annotations

from typing import Final

ANYONE: Final = frozenset({"anyone"})
SIGNED_IN: Final = frozenset({"signed in"})
PROVIDER: Final = frozenset({"the payment provider"})  # authenticated by its signature; no form, no session
EVERY_MEMBER: Final = frozenset({"owner", "member", "billing"})
KEY_HOLDERS: Final = frozenset({"owner", "member"})
PAYERS: Final = frozenset({"owner", "billing"})
OWNERS: Final = frozenset({"owner"})

#: Operator roles, for routes that begin with /operator. Only an admin may change both money and limits.
OPERATORS: Final = frozenset({"admin", "support", "finance", "read-only"})
SUPPORT: Final = frozenset({"admin", "support"})
FINANCE: Final = frozenset({"admin", "finance"})
WRITERS: Final = SUPPORT | FINANCE  # every operator who may change something
