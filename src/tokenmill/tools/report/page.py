"""Render figures and documents as one HTML file that loads nothing.

Document text is untrusted. Jinja escapes all of it; the documents of the browser are JSON without any `<`, and the
script inserts them as text only. A content security policy names the one script and the one style sheet by their
hashes, so that no injected script could run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.resources import files
from itertools import pairwise
from typing import Any

import jinja2
from markupsafe import Markup

from tokenmill.formatting import format_bytes, format_count, format_seconds, show_safely
from tokenmill.pipeline.journal.attempts import AttemptInfo, Moment
from tokenmill.tools.report.figures import Figures
from tokenmill.tools.report.svg import draw_lengths, draw_lines, draw_rows, draw_share, format_share

__all__ = ["render_page"]

MOST_POINTS = 60
LIMIT_SHARE = 1 / 3
"""The limit is drawn only if memory came near it; otherwise it would flatten the curve."""
POLICY = "img-src data:; base-uri 'none'; form-action 'none'"
ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})
"""The characters that could end the script element; in JSON they occur only inside strings."""


def render_page(figures: Figures, documents: bytes) -> bytes:
    """Render the page; `documents` is the browser's JSON."""
    style, script = (files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "number": lambda value: f"{value:,}",
        "decimal": lambda value: f"{value:,.1f}",
        "ratio": lambda value: "–" if value is None else f"{value:.2f}",
        "share": lambda value: "–" if value is None else format_share(value),
        "bytes": format_bytes,
        "brief": format_count,
        "clock": format_seconds,
        "time": _format_time,
        "safely": show_safely,
        "bar": draw_share,
    }
    template = environment.from_string(files(__package__).joinpath("page.html").read_text("utf-8"))
    page = template.render(
        f=figures,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; {POLICY}",
        documents=Markup(documents.decode().translate(ESCAPES)),
        draw_lengths=draw_lengths,
        draw_rows=draw_rows,
        plots=_draw_run(figures),
    )
    return page.encode()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _draw_run(figures: Figures) -> dict[str, Any]:
    """Draw throughput and memory over time, if the run kept a history."""
    attempts = [attempt for attempt in (figures.run.attempts if figures.run else []) if attempt.history]
    if not attempts:
        return {}
    timed = list(zip(attempts, _place(attempts), strict=True))
    highest = max(attempt.peak_memory_bytes for attempt in attempts)
    limit = attempts[-1].last.memory_limit
    return {
        "speed": draw_lines(
            [_speeds(attempt, start) for attempt, start in timed],
            unit="MB/s",
            format=lambda value: f"{value:.4g}",
            description="Text tokenized per second over the time of the run",
        ),
        "memory": draw_lines(
            [[(start + moment.seconds, moment.memory_bytes / 1e9) for moment in _thin(a)] for a, start in timed],
            unit="GB",
            format=lambda value: f"{value:.3g}",
            description="Memory of all processes over the time of the run",
            limit=limit / 1e9 if limit * LIMIT_SHARE < highest else None,
            kind="tokens",
        ),
    }


def _place(attempts: Sequence[AttemptInfo]) -> list[float]:
    """The start of each attempt on a clock that stops between attempts; ranks run at the same time."""
    starts: list[float] = []
    end = idle = attempts[0].started
    for attempt in attempts:
        idle += max(0.0, attempt.started - end)
        starts.append(attempt.started - idle)
        end = max(end, attempt.started + attempt.last.seconds)
    return starts


def _thin(attempt: AttemptInfo) -> list[Moment]:
    step = max(1, -(-len(attempt.history) // MOST_POINTS))
    return attempt.history[::step]


def _speeds(attempt: AttemptInfo, start: float) -> list[tuple[float, float]]:
    """Megabytes per second between moments, at the middle of each interval."""
    return [
        (start + (before.seconds + after.seconds) / 2, (after.num_text_bytes - before.num_text_bytes) / 1e6 / seconds)
        for before, after in pairwise([Moment(attempt.last.startup_seconds, 0, 0, 0), *_thin(attempt)])
        if (seconds := after.seconds - before.seconds) > 0
    ]


def _format_time(started: float) -> str:
    return datetime.fromtimestamp(started, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
