"""A document that people write and programs renew in part: each program owns what stands between its two marks."""

from __future__ import annotations


def check(text: str, begin: str, end: str) -> None:
    """Raises ValueError when `text` has no place between these marks."""
    _, there, rest = text.partition(begin)
    if not there or end not in rest:
        raise ValueError(f"the document has no place for results: the lines {begin!r} and {end!r} are missing")


def renewed(text: str, begin: str, end: str, content: str) -> str:
    """`text` with `content` between the marks; all else, other programs' places included, stays. Raises ValueError."""
    check(text, begin, end)
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n\n{content}\n{end}{after}"
