"""Fetches the front-end packages of the console: `make console-assets`. Needs npm; the service does not.

Writes the built files, one sprite of the icons and `vendor.json` with versions, licences and hashes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import quoteattr

VENDOR: Final = Path(__file__).parent / "static" / "vendor"
RECORD: Final = "vendor.json"
SPRITE: Final = "icons.svg"
#: Version of each package, and its built files: name in VENDOR → path in the package.
PACKAGES: Final = {
    "@tabler/core": ("1.6.1", {"tabler.min.css": "dist/css/tabler.min.css", "tabler.min.js": "dist/js/tabler.min.js"}),
    "htmx.org": ("4.0.1", {"htmx.min.js": "dist/htmx.min.js"}),
    "chart.js": ("4.6.1", {"chart.umd.min.js": "dist/chart.umd.min.js"}),
    "marked": ("18.2.1", {"marked.umd.js": "lib/marked.umd.js"}),
    "dompurify": ("3.4.18", {"purify.min.js": "dist/purify.min.js"}),
    "redoc": ("2.5.4", {"redoc.standalone.js": "bundles/redoc.standalone.js"}),
    "@highlightjs/cdn-assets": (
        "11.12.0",
        {
            "highlight.min.js": "es/core.min.js",
            **{
                f"highlight-{one}.min.js": f"es/languages/{one}.min.js"
                for one in ("bash", "javascript", "json", "python")
            },
        },
    ),
    # The typeface, in Latin letters. Its licence must accompany it.
    "@fontsource-variable/inter": (
        "5.3.0",
        {"inter.woff2": "files/inter-latin-wght-normal.woff2", "inter.licence.txt": "LICENSE"},
    ),
}
#: An address on another host that a file would load, and its replacement.
REPLACED: Final = {
    "redoc.standalone.js": (b"https://cdn.redoc.ly/redoc/logo-mini.svg", b"data:image/gif;base64,R0lGODlhAQABAAAAACw="),
}
ICON_PACKAGE: Final = ("@tabler/icons", "3.52.0", "tabler-nodes-outline.json")
ICONS: Final = (
    "activity adjustments alert-circle alert-triangle api arrow-left arrow-right ban bell bolt book books building "
    "building-bank calendar chart-area-line chart-bar chart-line check chevron-down chevron-left chevron-right "
    "chevron-up circle-check circle-dashed circle-x clock code coins columns copy cpu credit-card database "
    "device-desktop device-mobile dots-vertical download edit external-link eye eye-off file-invoice file-text filter "
    "fingerprint gauge gift git-branch help history home info-circle key layout-dashboard link list-details lock "
    "lock-open login logout mail menu-2 message-chatbot minus moon note player-pause player-play player-stop plus "
    "printer qrcode receipt refresh robot rotate search selector send server settings share shield-check speakerphone "
    "sun tag terminal-2 trash trending-down trending-up upload user user-check user-plus users wallet world x "
)


def main() -> int:
    """Downloads all packages. Returns the exit status."""
    if shutil.which("npm") is None:
        print("console-assets: npm is not installed", file=sys.stderr)
        return 1
    shutil.rmtree(VENDOR, ignore_errors=True)
    VENDOR.mkdir(parents=True)
    record = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (version, files) in PACKAGES.items():
            read = _package(name, version, Path(folder))
            for target, source in files.items():
                record.append(_write(target, read(source), name, version, read))
        name, version, nodes = ICON_PACKAGE
        read = _package(name, version, Path(folder))
        record.append(_write(SPRITE, sprite(json.loads(read(nodes))), name, version, read))
    (VENDOR / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return 0


def sprite(nodes: dict[str, list[tuple[str, dict[str, str]]]]) -> bytes:
    """Returns an SVG file with one symbol per icon. `nodes` has the shapes of each icon."""
    lines = ["<!-- Tabler Icons, MIT licence, copyright Paweł Kuna -->", '<svg xmlns="http://www.w3.org/2000/svg">']
    for icon in ICONS.split():
        shapes = "".join(
            f"<{tag} {' '.join(f'{key}={quoteattr(value)}' for key, value in attributes.items())}/>"
            for tag, attributes in nodes[icon]
        )
        lines.append(
            f'<symbol id="{icon}" viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2" '
            f'stroke-linecap="round" stroke-linejoin="round">{shapes}</symbol>'
        )
    return "\n".join([*lines, "</svg>", ""]).encode()


def _package(name: str, version: str, folder: Path) -> Any:
    """Downloads a package. Returns a function that reads one of its files."""
    command = ["npm", "pack", f"{name}@{version}", "--json", "--pack-destination", str(folder)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    archive = tarfile.open(folder / found[0]["filename"])  # noqa: SIM115

    def read(path: str) -> bytes:
        member = archive.extractfile(f"package/{path}")
        assert member is not None
        return member.read()

    return read


def _write(target: str, content: bytes, name: str, version: str, read: Any) -> dict[str, str]:
    """Writes the file. Returns its record."""
    content = content.replace(*REPLACED[target]) if target in REPLACED else content
    (VENDOR / target).write_bytes(content)
    licence = json.loads(read("package.json"))["license"]
    digest = hashlib.sha256(content).hexdigest()
    return {"file": target, "package": name, "version": version, "licence": licence, "sha256": digest}


if __name__ == "__main__":
    sys.exit(main())
