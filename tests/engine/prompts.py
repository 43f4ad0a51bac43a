"""Fifty varied prompts: short and long, code, prose, tables, and languages that are not written in Latin letters."""

from __future__ import annotations

QUESTIONS = [
    "What is the capital of France?",
    "Name three fruits.",
    "Why is the sky blue? Answer in one sentence.",
    "Write a haiku about rain.",
    "What is 17 times 23?",
    "Translate 'good morning' into Spanish, German and Italian.",
    "Give me a recipe for pancakes.",
    "Who wrote Don Quixote?",
    "Explain recursion to a child.",
    "List the planets in order.",
    "Is a tomato a fruit or a vegetable?",
    "Tell me a joke about a cat.",
    "Summarise the story of Icarus in two sentences.",
    "What should I pack for a week in the mountains?",
    "Say hello.",
    "Repeat after me: the quick brown fox jumps over the lazy dog.",
]

COMPLETIONS = [
    "Once upon a time, in a village at the edge of the salt marsh,",
    "The three laws of thermodynamics state that",
    "It was raining when the last train left, and nobody on the platform",
    "Dear Madam,\n\nI am writing to you about the piano that",
    "1, 2, 4, 8, 16,",
    "Monday, Tuesday, Wednesday,",
    "a b c d e f g a b c d e f g a b",
    "THE END OF THE WORLD WAS ANNOUNCED ON A",
    "| name | age | city |\n|---|---|---|\n| Ada | 36 | London |\n| Alan | 41 |",
    '{"name": "pump", "parts": [{"id": 1, "kind": "valve"}, {"id": 2, "kind":',
    "<ul>\n  <li>first</li>\n  <li>second</li>\n  <li>",
    "To be, or not to be, that is the question:",
    "x",
    "\n\n\n",
]

CODE = [
    "def fibonacci(n):\n    ",
    "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n        ",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "for (int i = 0; i < n; i++) {\n    sum += values[i];\n}\nfor (int j = 0; j < n; j++) {\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "fn main() {\n    let numbers = vec![1, 2, 3];\n    for number in",
    "#!/bin/sh\nset -eu\nfor file in *.txt; do\n",
    "const total = prices.reduce((sum, price) =>",
]

OTHER_SCRIPTS = [
    "用一句话介绍北京。",
    "春天来了，",
    "Расскажи короткую сказку о лисе.",
    "日本の首都は",
    "مرحبا، كيف",
    "नमस्ते, आप",
    "Η πρωτεύουσα της Ελλάδας είναι",
    "안녕하세요, 오늘",
]

LONG = [
    "The harbour master kept two books. In the first he wrote the ships that came, their cargo and their crew; in the "
    "second he wrote what the crews had told him in the evening, when the lamps were lit and the rain came in from the "
    "sea. Nobody had asked him for the second book. " * 3 + "One morning a stranger asked to see",
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return width * "
    "height * depth\n\n\n" * 4 + "def perimeter(width, height):\n    return",
    "Q: What is two plus two?\nA: Four.\nQ: What is the colour of grass?\nA: Green.\nQ: How many legs has a spider?\n"
    "A: Eight.\n" * 5 + "Q: How many days has a week?\nA:",
    " ".join(f"Item {number}: {number * number}." for number in range(1, 80)) + " Item 80:",
]
