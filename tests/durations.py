"""Seconds of junit reports by layer, a table as in docs/testing.md: `python -m tests.durations DAY.xml SLOW.xml`.

Make a report with `make test ARGS='--junitxml everyday.xml'`. A layer is a folder of tests; its seconds include what
its fixtures take to set up.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def seconds(report: Path) -> Counter[str]:
    """By layer, and of all together."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        layer = case.attrib["classname"].split(".")[1]  # tests.LAYER.test_file
        for name in (layer, "all"):
            found[name] += float(case.attrib["time"])
    return found


def main(paths: list[str]) -> None:
    reports = [(Path(path).stem, seconds(Path(path))) for path in paths]
    print("|".join(["", " layer ", *(f" {name}, s " for name, _ in reports), ""]))
    print("|".join(["", *["---"] * (len(reports) + 1), ""]))
    layers = sorted({layer for _, found in reports for layer in found} - {"all"})
    for layer in [*layers, "all"]:
        print("|".join(["", f" {layer} ", *(f" {found[layer]:.0f} " for _, found in reports), ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
