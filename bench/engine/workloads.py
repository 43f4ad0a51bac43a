"""Builds the requests: prompts generated from a seed, identical for every server.

A prompt is used once in a run, because a server with a prefix cache would skip part of the work for a repeated one.
Prompts share no more than their first words, except in the shared-prefix workload.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

Messages = list[dict[str, str]]

#: Short, because the model's own default system message is longer than some of the prompts.
SYSTEM = {"role": "system", "content": "Write at length."}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its messages and the number of tokens of the reply."""

    messages: Messages
    max_tokens: int
    temperature: float = 0.0


_ADJECTIVES = ("old", "quiet", "green", "narrow", "bright", "heavy", "early", "patient", "wooden", "silver", "gentle")
_NOUNS = ("harbour", "teacher", "engine", "river", "garden", "letter", "bridge", "market", "painter", "valley", "baker")
_VERBS = ("follows", "carries", "repairs", "remembers", "measures", "crosses", "answers", "watches", "builds", "paints")
_PLACES = ("behind the station", "near the coast", "before sunrise", "in the upper town", "after the storm", "at home")
_KINDS = ("Inventory", "Schedule", "Archive", "Register", "Counter", "Ledger", "Catalogue", "Roster", "Journal")
_NEW_NAMES = ("Warehouse", "Timetable", "Storage", "Directory", "Meter", "Accounts", "Collection", "Listing", "Diary")
_ITEMS = ("article", "visitor", "ticket", "sample", "parcel", "reading", "station", "member", "chapter", "vessel")


def short(seed: str) -> Ask:
    """About 40 prompt tokens, including the template; 64 to 128 output tokens."""
    rng = random.Random(seed)
    text = f"Tell a long story about {_sentence(rng).lower()[:-1]} {rng.choice(_PLACES)} in {rng.randint(1100, 1999)}."
    return Ask([SYSTEM, {"role": "user", "content": text}], rng.randint(64, 128))


def long(seed: str) -> Ask:
    """About 1,000 prompt tokens; 64 to 128 output tokens."""
    rng = random.Random(seed)
    return Ask([SYSTEM, {"role": "user", "content": prose(rng, 86) + "\n\nContinue this story."}], rng.randint(64, 128))


def intruder(seed: str) -> Ask:
    """A long prompt that disturbs `steady` streams: about 6,000 prompt tokens, 8 output tokens."""
    rng = random.Random(seed)
    return Ask([SYSTEM, {"role": "user", "content": prose(rng, 532) + "\n\nContinue this story."}], 8)


def steady(seed: str) -> Ask:
    """A short prompt with a long reply that streams while an `intruder` is computed, at the API's default temperature.

    A small model repeats itself in long greedy replies. Speculation would predict that text and distort the result.
    """
    return Ask(short(seed).messages, 1500, temperature=1.0)


def first_turn(seed: str) -> Ask:
    """A conversation that begins with about 1,000 tokens."""
    text = prose(random.Random(seed), 86) + "\n\nWho is in this story?"
    return Ask([SYSTEM, {"role": "user", "content": text}], 24)


def second_turn(first: Ask, reply: str) -> Ask:
    """The same conversation with one more question."""
    turn = [{"role": "assistant", "content": reply}, {"role": "user", "content": "What happens to them next?"}]
    return Ask([*first.messages, *turn], first.max_tokens)


def code_edit(seed: str) -> Ask:
    """A request to repeat a file with one class renamed. Most output tokens can be copied from the prompt."""
    rng = random.Random(seed)
    old, new, item = rng.choice(_KINDS), rng.choice(_NEW_NAMES), rng.choice(_ITEMS)
    limit = rng.randint(10, 99)
    code = f'''class {old}:
    """Keeps the number of pieces of each {item}."""

    def __init__(self, name):
        self.name = name
        self.limit = {limit}
        self.pieces = {{}}

    def add(self, {item}, count):
        if count <= 0:
            raise ValueError("count must be positive")
        self.pieces[{item}] = self.pieces.get({item}, 0) + count

    def remove(self, {item}, count):
        if self.pieces.get({item}, 0) < count:
            raise ValueError("not enough pieces")
        self.pieces[{item}] -= count

    def total(self):
        return sum(self.pieces.values())

    def is_full(self):
        return self.total() >= self.limit
'''
    text = f"Repeat the following Python file completely, with the class `{old}` renamed to `{new}`."
    return Ask([{"role": "user", "content": f"{text}\n\n```python\n{code}```"}], 160)


def prose(rng: random.Random, sentences: int) -> str:
    """Sentences of about 11 tokens."""
    return " ".join(f"{_sentence(rng)[:-1]} {rng.choice(_PLACES)}." for _ in range(sentences))


def _sentence(rng: random.Random) -> str:
    pick = rng.choice
    return f"The {pick(_ADJECTIVES)} {pick(_NOUNS)} {pick(_VERBS)} the {pick(_ADJECTIVES)} {pick(_NOUNS)}."
