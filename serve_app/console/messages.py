"""Texts of the e-mails that people get about their sign-in."""

from __future__ import annotations

from typing import Final

SIGN_UP: Final = """\
Confirm your email address to create your {product} account:

{link}

The link works for 24 hours. If you did not sign up, ignore this message.
"""
HAS_LOGIN: Final = """\
Someone asked to create a {product} account with this address, which has a login already.

Sign in: {link}

If it was not you, ignore this message. Your login has not changed.
"""
RESET: Final = """\
Choose a new password for {product}:

{link}

The link works once, for one hour. If you did not ask for it, ignore this message: your password has not changed.
"""
INVITED: Final = """\
{inviter} invites you to join {account} on {product} as {role}.

Accept the invitation:

{link}

The link works once, for 72 hours. If you do not know the sender, ignore this message.
"""
