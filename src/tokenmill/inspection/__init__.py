"""`inspect`: what a store holds, for people to look at: totals, lengths, and single documents."""

from __future__ import annotations

from tokenmill.inspection.documents import document_json, render_document, render_row, row_json
from tokenmill.inspection.overview import overview_json, render_overview

__all__ = ["document_json", "overview_json", "render_document", "render_overview", "render_row", "row_json"]
