"""Bytes that are not, or almost not, a JSON object: 400 with the place and a hint, or served where JSON allows them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from functools import partial

from tests.malformed.row import Row, sent, valid, with_text

GOOD = sent(valid())
TEXT = GOOD.decode()
MAX_BYTES = 4 * 1024 * 1024
FIFTY_MB = 50_000_000

_NO_JSON: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "empty"),
    ("white space", b" \r\n\t ", "empty"),
    ("a word", b"hello", "line 1 column 1"),
    ("a form", b"model=svc-chat&messages=Hi", "column 1"),
    ("a form with parts", b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nsvc-chat\r\n--x--', "send JSON"),
    ("HTML", b"<html><body>Hi</body></html>", "column 1"),
    ("YAML", b"model: svc-chat\nmessages: []\n", "column 1"),
    ("a Python dict", b"{'model': 'svc-chat', 'messages': []}", "double quotes"),
    ("a JavaScript object", b'{model: "svc-chat"}', "double quotes"),
    ("a string in single quotes", b'{"model": \'svc-chat\'}', "double quotes"),
    ("Python's True", with_text('"stream": True'), "column"),
    ("Python's None", with_text('"stop": None'), "column"),
    ("a member without a value", b'{"model": }', "column 11"),
    ("a missing comma", b'{"model": "a" "messages": []}', "expected `,`"),
    ("a missing colon", b'{"model" "a"}', "expected `:`"),
    ("a comma before the end", GOOD[:-1] + b",}", "comma"),
    ("a comma before the end of an array", b'{"messages": [1,]}', "comma"),
    ("a comma alone", b"{,}", "column 2"),
    ("a comment in front", b"// hello\n" + GOOD, "column 1"),
    ("a comment inside", b"{/* hello */" + GOOD[1:], "column 2"),
    ("two objects", GOOD + GOOD, "something after the object"),
    ("two objects on lines", GOOD + b"\n" + GOOD, "line 2 column 1"),
    ("a bracket too many", GOOD + b"}", "something after the object"),
    ("JSONP", b"callback(" + GOOD + b")", "column 1"),
    ("cut before the end", GOOD[:-1], "too early"),
    ("cut in a string", GOOD[:14], "too early"),
    ("cut in an escape", b'{"model": "\\u12', "too early"),
    ("cut in a number", b'{"n": -', "too early"),
    ("cut in a word", b'{"stream": tru', "too early"),
    ("an unknown escape", b'{"model": "\\q"}', "backslash"),
    ("a line end in a string", b'{"model": "a\nb"}', "escaped"),
    ("NUL in a string", with_text('"user": "\0"'), "escaped"),
    ("NUL in front", b"\0" + GOOD, "UTF-8"),
    ("zeros", b"\0" * 1000, "UTF-8"),
    ("a byte order mark", b"\xef\xbb\xbf" + GOOD, "byte order mark"),
    ("UTF-16 with a mark", TEXT.encode("utf-16"), "UTF-16"),
    ("UTF-16 without a mark", TEXT.encode("utf-16-le"), "UTF-16"),
    ("UTF-16, the other end first", TEXT.encode("utf-16-be"), "UTF-16"),
    ("UTF-32", TEXT.encode("utf-32-le"), "UTF-32"),
    ("Latin-1", TEXT.replace("Hi", "\xe9t\xe9").encode("latin-1"), "UTF-8"),
    ("compressed and not said to be", gzip.compress(GOOD, mtime=0), "compressed"),
    ("a broken character", GOOD.replace(b"Hi", b"\xf0\x9f\x98"), "UTF-8"),
    ("a character in too many bytes", GOOD.replace(b"Hi", b"\xc0\x80"), "UTF-8"),
    ("beyond the last character", GOOD.replace(b"Hi", b"\xf5\x80\x80\x80"), "UTF-8"),
    ("a surrogate in bytes", GOOD.replace(b"Hi", b"\xed\xa0\x80"), "UTF-8"),
    ("a broken character in a name", b'{"\xff": 1}', "UTF-8"),
    ("a high surrogate alone", GOOD.replace(b"Hi", b"\\ud800"), "pairs"),
    ("a low surrogate alone", GOOD.replace(b"Hi", b"\\udc00"), "pairs"),
    ("surrogates the wrong way round", GOOD.replace(b"Hi", b"\\udc00\\ud800"), "pairs"),
    ("two high surrogates", GOOD.replace(b"Hi", b"\\ud800\\ud800"), "pairs"),
    ("a surrogate alone in an unknown field", with_text('"user": "\\ud83d"'), "pairs"),
    ("a surrogate alone in a name", with_text('"\\ud83d": 1'), "pairs"),
    ("NaN", with_text('"temperature": NaN'), "NaN"),
    ("Infinity", with_text('"temperature": Infinity'), "NaN"),
    ("-Infinity", with_text('"temperature":-Infinity'), "NaN"),
    ("NaN in an unknown field", with_text('"user": [NaN]'), "NaN"),
    ("a leading zero", with_text('"n": 01'), "invalid number"),
    ("a leading plus", with_text('"n": +1'), "column"),
    ("no digit before the point", with_text('"top_p": .5'), "column"),
    ("no digit after the point", with_text('"top_p": 1.'), "invalid number"),
    ("hexadecimal", with_text('"n": 0x1'), "column"),
    ("digits in groups", with_text('"max_tokens": 1_000'), "column"),
    ("an integer of 5,000 digits", with_text('"seed": ' + "9" * 5000), "4300 digits"),
    ("a number of 1,000,000 digits in an unknown field", with_text('"user": ' + "9" * 10**6), "4300 digits"),
    ("an array", b"[]", "an array of 0"),
    ("a list of requests", b"[" + GOOD + b"]", "an array of 1"),
    ("JSON in a string", sent(TEXT), "the string"),
    ("null", b"null", "null"),
    ("true", b"true", "the boolean true"),
    ("a number", b"42", "the integer 42"),
    ("arrays 201 deep in an unknown field", with_text('"user": ' + "[" * 201 + "]" * 201), "200 deep"),
    ("objects 201 deep in an unknown field", with_text('"user": ' + '{"a":' * 201 + "1" + "}" * 201), "200 deep"),
    ("arrays without an end", b"[" * 100_000, "200 deep"),
    ("objects without an end", b'{"a":' * 100_000, "200 deep"),
    ("arrays without an end in an unknown field", with_text('"user": ' + "[" * 90_000), "200 deep"),
]  # fmt: skip

_CROWDS = {
    "100,001 biases": valid(logit_bias={str(n): 1 for n in range(100_001)}),
    "100,000 messages": valid(messages=[{"role": "user", "content": ""}] * 100_000),
    "100,000 objects in an unknown field": valid(user=[{}] * 100_000),
}

_SERVED: list[tuple[str, bytes]] = [
    ("white space around it", b" \r\n\t" + GOOD + b"\n\n"),
    ("a member twice, the last one counts", b'{"model": 5, ' + GOOD[1:]),
    ("NUL as an escape", GOOD.replace(b"Hi", b"Hi\\u0000")),
    ("every control character as an escape", GOOD.replace(b"Hi", b"".join(b"\\u%04x" % n for n in range(32)))),
    ("a pair of surrogates", GOOD.replace(b"Hi", b"\\ud83d\\ude00")),
    ("characters that some take for line ends", GOOD.replace(b"Hi", "a\u2028b\u2029c\x85d".encode())),
    ("a character that is none", GOOD.replace(b"Hi", "\uffff\U0010ffff".encode())),
    ("arrays 190 deep in an unknown field", with_text('"user": ' + "[" * 190 + "]" * 190)),
    ("a huge number in an unknown field", with_text('"user": 1e400')),
    ("a very small number", with_text('"temperature": 1e-400')),
    ("minus zero", with_text('"temperature": -0.0, "seed": -0')),
    ("unknown fields of any kind", with_text('"user": 5, "metadata": [], "store": {}, "service_tier": 1.5, "": null')),
]


def _of_length(length: int) -> bytes:
    return GOOD[:-1] + b" " * (length - len(GOOD)) + b"}"


def rows() -> Iterator[Row]:
    """Bytes that are not JSON, JSON beyond a bound, and unusual but valid JSON."""
    for name, body, says in _NO_JSON:
        yield Row(name, body, 400, None, (says,))
    for name, crowd in _CROWDS.items():
        yield Row(name, partial(sent, crowd), 400, None, ("more than 100000 values",))
    endless = with_text('"user": ' + "[" * 100_001)
    yield Row("100,001 arrays without an end", endless, 400, None, ("more than 100000 values",))
    for name, text in (("commas", "," * 100_001), ("quotes", '"],[' * 50_001), ("backslashes", '\\",[' * 50_001)):
        yield Row(f"{name} in a string that are no values", sent(valid(user=text)), 200)
    yield Row("a byte over 4 MiB", lambda: _of_length(MAX_BYTES + 1), 400, None, ("4194304 bytes",))
    yield Row("50 MB", lambda: b"x" * FIFTY_MB, 400, None, ("4194304 bytes",))
    for name, body in _SERVED:
        yield Row(name, body, 200)
    yield Row("exactly 4 MiB", lambda: _of_length(MAX_BYTES), 200)
