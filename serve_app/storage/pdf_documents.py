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
from serve_app.contracts.money import format_amount, places_of

KINDS: Final = {"top_up": "Payment", "grant": "Credit given", "correction": "Correction", "expiry": "Expired credit"}
_WIDTH: Final = 170.0  # mm between the margins of A4
_MARGIN: Final = 20.0
_GREY: Final = 110
_RULE: Final = 220
_SHADE: Final = 245


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
    return f"{'-' if nano < 0 else ''}{int(whole):,}{point}{fraction.ljust(places, '0')}"


def invoice_number(payment: Movement) -> str:
    """Returns the invoice's number: the year, and the number of the payment's journal entry."""
    return f"{time.strftime('%Y', time.gmtime(payment.created_at))}-{payment.entry_id:06}"


def statement_pdf(seller: Seller, customer: Customer, statement: Statement, now: float) -> bytes:
    """Returns the statement of a month. If the month is not over, the statement says until when it counts."""
    month = statement.month
    is_over = now >= month.ends
    title = f"Statement of {time.strftime('%B %Y', time.gmtime(month.begins))}"
    page = _Document(seller, title, month.ends if is_over else now)
    page.parties(
        title,
        customer,
        [
            ("Account", customer.account_id),
            ("Period", f"1 to {_day(month.ends - 1)} (UTC)"),
            *([] if is_over else [("Counted until", f"{_minute(now)}; the month is not over")]),
            ("Currency", customer.currency),
        ],
    )
    head = f"Amount ({customer.currency})"
    parts = [*(one.amount for one in statement.movements), *(row.charged for row in statement.usage)]
    places = places_of([statement.opening, *parts])  # enough for the columns to add up exactly
    sums = [("Opening balance", statement.opening)]
    for kind, name in KINDS.items():
        if found := [one.amount for one in statement.movements if one.kind == kind]:
            sums.append((f"{name}s" if kind != "grant" else "Credits given", sum(found)))
    sums.append(("Usage", -sum(row.charged for row in statement.usage)))
    sums.append(("Closing balance" if is_over else "Balance", statement.closing))
    page.rows("Summary", ("", head), (120, 50), [(name, amount(nano, places)) for name, nano in sums], bold=sums[-1][0])
    moves = [(_minute(one.created_at)[:-4], _what(one), amount(one.amount, places)) for one in statement.movements]
    if moves:
        page.rows("Payments and credits", ("Time (UTC)", "What", head), (38, 92, 40), moves)
    usage = [
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
        page.rows("Usage by model", columns, (45, 18, 26, 26, 25, 30), usage)
    page.note("Usage counts in the month (UTC) in which its request ended. Amounts are exact.")
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

    def parties(self, title: str, customer: Customer, facts: Sequence[tuple[str, str]]) -> None:
        """Writes the seller, the title, the customer, and `facts` about the document."""
        self._font(13, bold=True)
        self._line(self._seller.name, 7)
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
        self.multi_cell(0, 4, self._printable(text), align="L")

    def content(self) -> bytes:
        return bytes(self.output())

    def _line(self, text: str, height: float) -> None:
        self.multi_cell(0, height, self._printable(text), new_x=XPos.LMARGIN, new_y=YPos.NEXT, align="L")

    def _font(self, size: float, *, bold: bool = False, grey: bool = False) -> None:
        self.set_font(self._family, "B" if bold else "", size)
        self.set_text_color(_GREY if grey else 0)

    def _printable(self, text: str) -> str:
        """Replaces letters that the built-in font does not have."""
        if self._family != "Helvetica":
            return text
        return text.encode("windows-1252", "replace").decode("windows-1252")


def _is_number(cell: str) -> bool:
    return cell.lstrip("-").replace(",", "").replace(".", "", 1).isdigit()


def _day(at: float) -> str:
    moment = time.gmtime(at)
    return f"{moment.tm_mday} {time.strftime('%B %Y', moment)}"


def _minute(at: float) -> str:
    moment = time.gmtime(at)
    return f"{moment.tm_mday} {time.strftime('%b %Y, %H:%M UTC', moment)}"
