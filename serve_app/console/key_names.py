"""Names of an account's keys on its pages. A person's playground keys appear as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from serve_app.contracts.books import KeySnapshot

PLAYGROUND_S: Final = 3600.0  # validity of a playground key
_PLAYGROUND: Final = "Playground of "
_SKEW_S: Final = 5.0  # maximum difference between the clocks of the console and the ledger


def playground_name(email: str) -> str:
    """Returns the name of a person's playground keys."""
    return f"{_PLAYGROUND}{email}"[:100]


def is_playground(key: KeySnapshot) -> bool:
    """Returns whether the playground created the key.

    Checks the period of validity as well as the name: a name alone must not hide a key that its owner created.
    """
    is_short = key.expires_at is not None and key.expires_at - key.created_at <= PLAYGROUND_S + _SKEW_S
    return is_short and key.name.startswith(_PLAYGROUND)


@dataclass(frozen=True, slots=True)
class KeyNames:
    """Groups the keys of an account. `of` has each key's group, and `labels` each group's name."""

    of: Mapping[str, str]
    labels: Mapping[str, str]
    tags: tuple[str, ...]
    _keys: tuple[KeySnapshot, ...] = field(repr=False)

    @classmethod
    def among(cls, keys: list[KeySnapshot]) -> KeyNames:
        of = {key.key_id: f"playground:{key.name}" if is_playground(key) else key.key_id for key in keys}
        used = Counter(key.name for key in keys if not is_playground(key))
        labels = {
            of[key.key_id]: f"{key.name} ({key.hint})" if used[key.name] > 1 and not is_playground(key) else key.name
            for key in keys
        }
        return cls(of, labels, tuple(sorted({tag for key in keys for tag in key.tags or ()})), tuple(keys))

    def ids(self, group: str = "", tag: str | None = None) -> tuple[str, ...] | None:
        """Returns the ids of the keys in `group` with `tag`. With neither, returns None: all keys."""
        if not group and tag is None:
            return None
        return tuple(
            key.key_id
            for key in self._keys
            if (not group or self.of[key.key_id] == group) and (tag is None or tag in (key.tags or ("",)))
        )
