"""The display of a notebook: one output of the cell, drawn by rich, that is replaced as the run progresses.

rich's own live display needs `ipywidgets`, shows nothing where they are missing, and leaves nothing in a saved
notebook. An output with an id needs neither: every front end of Jupyter can replace it.
"""

from __future__ import annotations

import io
import time
from typing import Any

from tokenmill.display import Draw, Preparation, Snapshot

__all__ = ["NotebookBar", "render_html"]

COLUMNS = 100
SECONDS_BETWEEN = 0.25
"""A notebook keeps every message until the browser has drawn it."""
STYLE = "white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',consolas,monospace"


def render_html(drawn: Any, width: int = COLUMNS) -> str:
    """Draw something of rich as HTML."""
    from rich.console import Console

    console = Console(file=io.StringIO(), record=True, width=width, highlight=False, force_jupyter=False)
    console.print(drawn)
    return console.export_html(inline_styles=True, code_format=f'<pre style="{STYLE}">{{code}}</pre>')


class NotebookBar:
    """A bar and its figures, and messages as lines above them."""

    def __init__(self, draw: Draw) -> None:
        from rich.console import Group

        self._draw, self._group = draw, Group
        self._lines: list[Any] = []
        self._latest: Snapshot | Preparation | None = None
        self._shown_at = 0.0
        self._handle: Any = None

    def say(self, text: str, *, style: str = "") -> None:
        """Add a line above the bar."""
        from rich.text import Text

        self._lines.append(Text(text, style=style))
        self._show()

    def update(self, snapshot: Snapshot | Preparation) -> None:
        """Redraw the bar, a few times a second."""
        self._latest = snapshot
        if time.monotonic() - self._shown_at >= SECONDS_BETWEEN:
            self._show()

    def close(self) -> None:
        """Draw the bar where it stopped, or remove it if all is done: a line about the result takes its place."""
        if self._latest is not None and self._latest.fraction == 1.0:
            self._latest = None
        self._show()

    def _show(self) -> None:
        from IPython.display import HTML, display  # type: ignore[import-not-found]

        self._shown_at = time.monotonic()
        drawn = [] if self._latest is None else [self._draw(self._latest, COLUMNS)]
        if not (self._lines or drawn):
            return
        shown = HTML(render_html(self._group(*self._lines, *drawn)))
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)
