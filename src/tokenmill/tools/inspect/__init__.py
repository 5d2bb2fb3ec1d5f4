"""`inspect`: what a store holds: totals, document lengths, single documents and training rows."""

from __future__ import annotations

from tokenmill.tools.inspect.document_view import document_json, render_document, render_row, row_json
from tokenmill.tools.inspect.overview import overview_json, render_overview

__all__ = ["document_json", "overview_json", "render_document", "render_overview", "render_row", "row_json"]
