"""The names that a client may send as `model`: identifiers and their aliases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from serve_app.api import errors

ServedModels = Mapping[str, tuple[int, int]]
"""(Context length, maximum output) by identifier, both in tokens. May be a ServedNames."""


class ServedNames(dict[str, tuple[int, int]]):
    """Limits by identifier, with aliases. `aliases` has pairs (alias, identifier); an alias's first pair counts."""

    def __init__(self, limits: ServedModels, aliases: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(limits)
        self.aliases: dict[str, str] = {}  # alias → identifier, without wildcards
        prefixes: dict[str, str] = {}
        for alias, identifier in aliases:
            names = prefixes if alias.endswith("*") else self.aliases
            names.setdefault(alias.removesuffix("*"), identifier)
        self._prefixes = sorted(prefixes.items(), key=lambda pair: -len(pair[0]))

    def identifier_of(self, name: str) -> str:
        """Returns the identifier that a name stands for; the name itself if it stands for none.

        Identifiers take precedence over aliases, aliases over wildcards, and longer wildcards over shorter ones.
        """
        if name in self:
            return name
        wildcard = next((identifier for prefix, identifier in self._prefixes if name.startswith(prefix)), name)
        return self.aliases.get(name, wildcard)


def identifier_of(name: str, served: ServedModels) -> str:
    """Returns the identifier that a name stands for; the name itself if it stands for none."""
    return served.identifier_of(name) if isinstance(served, ServedNames) else name


def served_identifier(name: str, served: ServedModels) -> str:
    """Returns the identifier that a name stands for. Raises ApiError (422) if it stands for none."""
    identifier = identifier_of(name, served)
    if identifier not in served:
        raise errors.model_not_found(name, served)
    return identifier
