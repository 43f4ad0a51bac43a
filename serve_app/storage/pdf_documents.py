"""Statements and invoices as PDF. The same document always has the same bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from fpdf import FPDF
from fpdf.enums import XPos, YPos
from fpdf.fonts import FontFace

from serve_app.contracts.billing import BillingDetails, Seller
from serve_app.contracts.books import Movement, Statement
from serve_app.contracts.money import MINUS, fixed_amount, format_amount, places_of, summing_places

KINDS: Final = {"top_up": "Payment", "grant": "Credit given", "correction": "Correction", "expiry": "Expired credit"}
_WIDTH: Final = 170.0  # mm between the margins of A4
_MARGIN: Final = 20.0
_GREY: Final = 110
_RULE: Final = 220
_SHADE: Final = 245
_MARK: Final = (6, 111, 209)  # the console's blue
_BADGE: Final = (255, 236, 190)


class DocumentFontMissing(ValueError):
    """The font that the settings name cannot be read."""


@dataclass(frozen=True, slots=True)
class Customer:
    """An account with its details for invoices."""

    account_id: str
    name: str
    currency: str
    details: BillingDetails

    def lines(self) -> list[str]:
        found = self.details
        named = [found.company or self.name, *found.address.splitlines()]
        named += [f"Tax ID: {found.tax_id}"] if found.tax_id else []
        return [*named, *([found.email] if found.email else [])]


def amount(nano: int, places: int = 2) -> str:
    """Returns the exact amount with thousands separators and at least `places` decimal places."""
    whole, point, fraction = format_amount(abs(nano)).partition(".")
    return f"{MINUS if nano < 0 else ''}{int(whole):,}{point}{fraction.ljust(places, '0')}"


def invoice_number(payment: Movement) -> str:
    """Returns the invoice's number: the year, and the number of the payment's journal entry."""
    return f"{time.strftime('%Y', time.gmtime(payment.created_at))}-{payment.entry_id:06}"


def statement_pdf(seller: Seller, customer: Customer, statement: Statement, now: float) -> bytes:
    """Returns the statement of a month. Before the month is over, it names the time up to which it counts."""
    month = statement.month
    is_over = now >= month.ends
    title = f"Statement of {time.strftime('%B %Y', time.gmtime(month.begins))}"
    page = _Document(seller, title, month.ends if is_over else now)
    page.parties(
        title,
        customer,
        [
            ("Account", customer.account_id),
            ("Period", f"{_day(month.begins)} to {_day(month.ends - 1)} (UTC)"),
            *([] if is_over else [("Counted until", _minute(now))]),
            ("Currency", customer.currency),
        ],
        badge="" if is_over else "The month is not over",
    )
    head = f"Amount ({customer.currency})"
    sums = [("Opening balance", statement.opening)]
    for kind, name in KINDS.items():
        if found := [one.amount for one in statement.movements if one.kind == kind]:
            sums.append((f"{name}s" if kind != "grant" else "Credits given", sum(found)))
    used = sum(row.charged for row in statement.usage)
    sums.append(("Usage", -used))
    places = summing_places([nano for _, nano in sums])
    is_rounded = places < places_of([*(nano for _, nano in sums), statement.closing])
    last = "Closing balance" if is_over else "Balance so far"
    summary = [(name, fixed_amount(nano, places)) for name, nano in [*sums, (last, statement.closing)]]
    page.rows("Summary", ("", head), (120, 50), summary, bold=last)
    places = places_of([one.amount for one in statement.movements])  # enough for every amount in the column
    moves = [(_minute(one.created_at)[:-4], _what(one), amount(one.amount, places)) for one in statement.movements]
    if moves:
        page.rows("Payments and credits", ("Time (UTC)", "What", head), (38, 92, 40), moves)
    places = places_of([row.charged for row in statement.usage])
    usage: list[Sequence[str]] = [
        (row.model or "", f"{row.requests:,}", f"{row.prompt_tokens:,}", f"{row.cached_tokens:,}",
         f"{row.completion_tokens:,}", amount(row.charged, places))
        for row in statement.usage
    ]  # fmt: skip
    if usage:
        columns = (
            "Model",
            "Requests",
            "Input tokens",
            "Cached input",
            "Output tokens",
            f"Cost ({customer.currency})",
        )
        counts = [
            sum(getattr(row, name) for row in statement.usage)
            for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
        ]
        usage.append(("Total", *(f"{one:,}" for one in counts), amount(used, places)))
        page.rows("Usage by model", columns, (45, 18, 26, 26, 25, 30), usage, bold="Total")
    page.note(
        "This is a statement, not an invoice: each payment has its own invoice. "
        "Usage counts in the month (UTC) in which its request ended."
    )
    if is_rounded:
        exact = [("opening balance", statement.opening), (last[0].lower() + last[1:], statement.closing)]
        said = ", ".join(f"{name} {amount(nano)} {customer.currency}" for name, nano in exact)
        page.note(f"The summary is rounded. Exact {said}.")
    return page.content()


def _what(movement: Movement) -> str:
    return KINDS[movement.kind] + (f": {movement.memo}" if movement.memo else "")


def invoice_pdf(seller: Seller, customer: Customer, payment: Movement) -> bytes:
    """Returns the invoice of a payment, a movement of kind top_up."""
    number = invoice_number(payment)
    page = _Document(seller, f"Invoice {number}", payment.created_at)
    page.parties(
        f"Invoice {number}",
        customer,
        [
            ("Date", _day(payment.created_at)),
            ("Account", customer.account_id),
            ("Status", f"Paid on {_day(payment.created_at)}; nothing is due"),
            *([("Reference", payment.memo)] if payment.memo else []),
        ],
    )
    paid = amount(payment.amount)
    page.rows(
        "",
        ("Description", f"Amount ({customer.currency})"),
        (120, 50),
        [("Prepaid balance for API usage", paid), ("Total", paid), ("Paid", paid), ("Due", amount(0))],
        bold="Total",
    )
    return page.content()


class _Document(FPDF):
    """An A4 document of the seller, with numbered pages."""

    def __init__(self, seller: Seller, title: str, at: float) -> None:
        super().__init__()
        self._seller, self._title = seller, title
        self._family = "Helvetica"
        if seller.font is not None:
            try:
                for style in ("", "B"):
                    self.add_font("document", style, Path(seller.font))
            except (OSError, ValueError, RuntimeError) as error:
                raise DocumentFontMissing(f"{seller.font}: {error}") from None
            self._family = "document"
        else:
            self.core_fonts_encoding = "windows-1252"
        self.set_creation_date(datetime.fromtimestamp(int(at), UTC))
        self.set_title(title)
        self.set_author(self._printable(seller.name))
        self.set_margins(_MARGIN, _MARGIN)
        self.set_auto_page_break(True, 22)
        self.alias_nb_pages()
        self.add_page()

    def footer(self) -> None:
        """Writes the number of each page; the library calls it."""
        self.set_y(-15)
        self._font(8, grey=True)
        text = f"{self._seller.name}   {self._title}   Page {self.page_no()} of {{nb}}"
        self.cell(0, 5, self._printable(text), align="C")

    def parties(self, title: str, customer: Customer, facts: Sequence[tuple[str, str]], badge: str = "") -> None:
        """Writes the seller, the title with an optional badge, the customer, and facts such as the date."""
        self._mark()
        self._font(13, bold=True)
        self._line(self._seller.name, 8)
        self.ln(1)
        self._font(9, grey=True)
        lines = self._seller.address.splitlines()
        lines += [f"Tax ID: {self._seller.tax_id}"] if self._seller.tax_id else []
        for line in [*lines, *([self._seller.email] if self._seller.email else [])]:
            self._line(line, 4.5)
        self.ln(4)
        self.set_draw_color(_RULE)
        self.line(_MARGIN, self.get_y(), _MARGIN + _WIDTH, self.get_y())
        self.ln(8)
        self._font(18, bold=True)
        if badge:
            self.cell(self.get_string_width(self._printable(title)) + 4, 10, self._printable(title))
            self._badge(badge)
        else:
            self._line(title, 10)
        self.ln(2)
        top = self.get_y()
        self._font(9, grey=True)
        self._line("For", 5)
        self._font(10)
        for line in customer.lines():
            self.multi_cell(80, 5, self._printable(line), new_x=XPos.LMARGIN, new_y=YPos.NEXT, align="L")
        bottom = self.get_y()
        self.set_y(top)
        for name, value in facts:
            self.set_x(_MARGIN + 85)
            self._font(9, grey=True)
            self.cell(27, 5, self._printable(name))
            self._font(9)
            self.multi_cell(58, 5, self._printable(value), new_x=XPos.LMARGIN, new_y=YPos.NEXT, align="L")
        self.set_y(max(bottom, self.get_y()) + 8)

    def _mark(self) -> None:
        """Draws the seller's initial on a coloured square."""
        x, y = self.get_x() + self.c_margin, self.get_y()
        self._filled(x, y, 8, 8, _MARK)
        self.set_x(x)
        self._font(13, bold=True)
        self.set_text_color(255)
        self.cell(8, 8, self._printable(self._seller.name[:1].upper()), align="C")
        self.set_x(x + 9.5)

    def _filled(self, x: float, y: float, width: float, height: float, colour: tuple[int, int, int]) -> None:
        self.set_fill_color(*colour)
        self.rect(x, y, width, height, style="F", round_corners=True, corner_radius=height / 5)
        self.set_fill_color(255)  # restores the background of table rows

    def _badge(self, text: str) -> None:
        self._font(8.5)
        width = self.get_string_width(self._printable(text)) + 4
        self._filled(self.get_x(), self.get_y() + 2.3, width, 5.6, _BADGE)
        self.cell(width, 10.2, self._printable(text), align="C", new_x=XPos.LMARGIN, new_y=YPos.NEXT)

    def rows(
        self,
        title: str,
        head: Sequence[str],
        widths: Sequence[float],
        rows: Sequence[Sequence[str]],
        *,
        bold: str | None = None,
    ) -> None:
        """Writes a table. Columns of numbers are right-aligned, the others left-aligned.

        The row that begins with `bold` is bold.
        """
        if title:
            self._font(12, bold=True)
            self._line(title, 8)
        self._font(9)
        self.set_line_width(0.2)
        numeric = [all(_is_number(row[index]) for row in rows) for index in range(len(head))]
        self.set_draw_color(_RULE)
        with self.table(
            width=_WIDTH,
            col_widths=tuple(widths),
            text_align=tuple("RIGHT" if one else "LEFT" for one in numeric),
            borders_layout="HORIZONTAL_LINES",
            line_height=5,
            padding=(1.2, 1.5),
            headings_style=FontFace(emphasis="", color=_GREY, fill_color=_SHADE),
        ) as drawn:
            for row in [head, *rows]:
                style = FontFace(emphasis="BOLD", fill_color=_SHADE) if row[0] == bold else None
                drawn.row([self._printable(cell) for cell in row], style=style)
        self.ln(7)

    def note(self, text: str) -> None:
        self._font(8, grey=True)
        self.multi_cell(0, 4, self._printable(text), new_x=XPos.LMARGIN, new_y=YPos.NEXT, align="L")
        self.ln(1)

    def content(self) -> bytes:
        return bytes(self.output())

    def _line(self, text: str, height: float) -> None:
        self.multi_cell(0, height, self._printable(text), new_x=XPos.LMARGIN, new_y=YPos.NEXT, align="L")

    def _font(self, size: float, *, bold: bool = False, grey: bool = False) -> None:
        self.set_font(self._family, "B" if bold else "", size)
        self.set_text_color(_GREY if grey else 0)

    def _printable(self, text: str) -> str:
        """Replaces characters that the built-in font does not have. The minus sign becomes an en dash."""
        if self._family != "Helvetica":
            return text
        return text.replace(MINUS, "\N{EN DASH}").encode("windows-1252", "replace").decode("windows-1252")


def _is_number(cell: str) -> bool:
    return cell.lstrip(MINUS).replace(",", "").replace(".", "", 1).isdigit()


def _day(at: float) -> str:
    moment = time.gmtime(at)
    return f"{moment.tm_mday} {time.strftime('%b %Y', moment)}"


def _minute(at: float) -> str:
    moment = time.gmtime(at)
    return f"{moment.tm_mday} {time.strftime('%b %Y, %H:%M UTC', moment)}"
