"""Tables of the reports as a terminal shows them."""

from __future__ import annotations

from rich.table import Table

from rag_service.report_rendering import Tabular


def rich_table(found: Tabular, title: str) -> Table:
    """The same header and rows under ``title``."""
    table = Table(*found.header, title=title, title_justify="left")
    for row in found.rows:
        table.add_row(*row)
    return table
