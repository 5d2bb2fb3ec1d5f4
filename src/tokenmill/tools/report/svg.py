"""Plots as hand-written SVG. The page must load nothing, and a plotting library is an extra that few users install.

Colours come from the style sheet by class, so that plots follow the theme of the page. Every mark has a title, which
browsers show as a tooltip, and every plot has a description for screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from tokenmill.formatting import format_seconds
from tokenmill.tools.inspect.statistics import LengthCount
from tokenmill.tools.report.figures import DrawnRow, DrawnSegment

__all__ = ["draw_lengths", "draw_lines", "draw_rows", "draw_share", "format_share"]

WIDTH, HEIGHT = 480.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 12.0, 12.0, 46.0
ROW_HEIGHT, ROW_PITCH, ROW_LABEL = 12.0, 17.0, 76.0
MOST_LABELS = 7

Points = Sequence[tuple[float, float]]


def format_share(share: float) -> str:
    """`3.1%`; small shares keep two digits, and a share above zero never shows as 0%."""
    percent = 100 * share
    if percent in (0.0, 100.0):
        return f"{percent:.0f}%"
    if abs(percent) < 0.01:
        return "<0.01%"
    if 99.95 <= percent < 100:
        return ">99.9%"
    return f"{percent:.2f}%" if 0 < percent < 1 else f"{percent:.1f}%"


def draw_share(share: float) -> Markup:
    """Draw a small bar for a cell of a table."""
    bar = Markup('<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">{}</svg>')
    return bar.format(_rect(0, 0, 100, 8, "track") + _rect(0, 0, max(0.0, min(1.0, share)) * 100, 8, "fill"))


def draw_lengths(bins: Sequence[LengthCount], name: str) -> Markup:
    """Draw two bars for each bin of lengths: its share of the documents, and of the tokens."""
    num_documents = sum(some.num_documents for some in bins) or 1
    num_tokens = sum(some.num_tokens for some in bins) or 1
    shares = [(some.num_documents / num_documents, some.num_tokens / num_tokens) for some in bins]
    top, ticks = _ticks(max((max(pair) for pair in shares), default=1.0))
    plot = _Plot(top)
    parts = [plot.grid(ticks, lambda value: f"{100 * value:.3g}%", "share")]
    step = plot.width / max(1, len(bins))
    thickness = max(1.0, min(14.0, step * 0.4))
    for place, (some, pair) in enumerate(zip(bins, shares, strict=True)):
        middle = LEFT + (place + 0.5) * step
        title = (
            f"{_range(some)} tokens: {some.num_documents:,} documents ({format_share(pair[0])}), "
            f"{some.num_tokens:,} tokens ({format_share(pair[1])})"
        )
        left = _bar(plot, middle - thickness, thickness, pair[0], "documents")
        right = _bar(plot, middle, thickness, pair[1], "tokens")
        # The tooltip covers the whole column, because low bars are hard to hit.
        column = _rect(LEFT + place * step, TOP, step, plot.height, "hover")
        parts.append(Markup("<g>{}{}{}{}</g>").format(_title(title), column, left, right))
    parts.append(_length_labels(bins, step))
    parts.append(_text(LEFT + plot.width / 2, HEIGHT - 6, "tokens in a document", "middle"))
    description = f"Histogram of document lengths of {name}, from {bins[0].start:,} to {bins[-1].stop - 1:,} tokens"
    return _svg(WIDTH, HEIGHT, description, Markup("").join(parts))


def _length_labels(bins: Sequence[LengthCount], step: float) -> Markup:
    if len(bins) <= MOST_LABELS:
        centres = [(LEFT + (place + 0.5) * step, _range(some)) for place, some in enumerate(bins)]
        return Markup("").join(_text(x, HEIGHT - BOTTOM + 16, label, "middle") for x, label in centres)
    powers = [(place, some.start) for place, some in enumerate(bins) if some.start & (some.start - 1) == 0]
    thinned = powers[:: max(1, math.ceil(len(powers) / MOST_LABELS))]
    labels = [_text(LEFT + place * step, HEIGHT - BOTTOM + 16, f"{start:,}", "middle") for place, start in thinned]
    return Markup("").join(labels)


def _bar(plot: _Plot, x: float, width: float, share: float, kind: str) -> Markup:
    y = plot.y(share)
    return _rect(x, y, width, TOP + plot.height - y, kind)


def _range(some: LengthCount) -> str:
    return f"{some.start:,}" if some.stop - some.start == 1 else f"{some.start:,} to {some.stop - 1:,}"


def draw_lines(
    lines: Sequence[Points],
    *,
    unit: str,
    format: Callable[[float], str],
    description: str,
    limit: float | None = None,
    kind: str = "documents",
) -> Markup:
    """Draw values over seconds, a line for each attempt; `limit` is a level that they should stay below."""
    seconds = max((x for line in lines for x, _ in line), default=1.0) or 1.0
    highest = max((y for line in lines for _, y in line), default=1.0) or 1.0
    top, ticks = _ticks(max(highest, limit or 0.0))
    plot = _Plot(top, seconds)
    parts = [plot.grid(ticks, format, unit), plot.times()]
    if limit is not None:
        y = plot.y(limit)
        parts.append(
            Markup('<g>{}<line class="limit" x1="{}" x2="{}" y1="{}" y2="{}"/></g>').format(
                _title(f"limit {format(limit)}"), _number(LEFT), _number(WIDTH - RIGHT), _number(y), _number(y)
            )
        )
    for line in lines:
        # A line of one point has no length; a second point at the same place makes its round caps visible.
        ends = [*line, *line] if len(line) == 1 else line
        path = " ".join(f"{_number(plot.x(x))},{_number(plot.y(y))}" for x, y in ends)
        parts.append(Markup('<polyline class="line {}" points="{}"/>').format(kind, path))
        for x, y in line:
            dot = Markup('<circle class="dot" cx="{}" cy="{}" r="5">{}</circle>')
            where = f"{format(y)} {unit} at {format_seconds(x)}"
            parts.append(dot.format(_number(plot.x(x)), _number(plot.y(y)), _title(where)))
    return _svg(WIDTH, HEIGHT, description, Markup("").join(parts))


def draw_rows(rows: Sequence[DrawnRow], seq_len: int, name: str) -> Markup:
    """Draw rows: documents in two alternating shades, marks where they are cut, and padding."""
    height = TOP + len(rows) * ROW_PITCH + 34
    width = WIDTH - ROW_LABEL - RIGHT
    parts = [_draw_row(row, TOP + place * ROW_PITCH, seq_len, width / seq_len) for place, row in enumerate(rows)]
    base = TOP + len(rows) * ROW_PITCH + 10
    parts.append(_text(ROW_LABEL - 8, base, "row", "end"))
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        parts.append(_text(ROW_LABEL + share * width, base, f"{int(share * seq_len):,}", anchor))
    parts.append(_text(ROW_LABEL + width / 2, base + 16, "token of the row", "middle"))
    description = f"{len(rows)} rows of {seq_len:,} tokens under {name}: documents, cuts and padding"
    return _svg(WIDTH, height, description, Markup("").join(parts))


def _draw_row(row: DrawnRow, y: float, seq_len: int, scale: float) -> Markup:
    parts = [_text(ROW_LABEL - 8, y + ROW_HEIGHT - 2, f"{row.number:,}", "end")]
    parts += [_draw_segment(segment, number, y, scale) for number, segment in enumerate(row.segments)]
    used = sum(segment.num_tokens for segment in row.segments)
    rest = seq_len - used - row.num_more_tokens
    for count, kind, title in (
        (row.num_more_tokens, "more", f"{row.num_more_documents:,} more documents"),
        (rest, "padding", f"padding, {rest:,} tokens"),
    ):
        if count:
            mark = _rect(ROW_LABEL + used * scale, y, count * scale, ROW_HEIGHT, kind)
            parts.append(Markup("<g>{}{}</g>").format(_title(title), mark))
            used += count
    return Markup("").join(parts)


def _draw_segment(segment: DrawnSegment, number: int, y: float, scale: float) -> Markup:
    x, width = ROW_LABEL + segment.start * scale, segment.num_tokens * scale
    cuts = [name for name, is_cut in (("begins", segment.is_cut_before), ("ends", segment.is_cut_behind)) if is_cut]
    where = f"; {' and '.join(cuts)} in another row" if cuts else ""
    title = f"document {segment.document:,}, {segment.num_tokens:,} tokens from {segment.start:,}{where}"
    marks = [_rect(x, y, max(1.0, width), ROW_HEIGHT, "even" if number % 2 == 0 else "odd")]
    if segment.is_cut_before:
        marks.append(_rect(x, y, 2.5, ROW_HEIGHT, "cut"))
    if segment.is_cut_behind:
        marks.append(_rect(x + width - 2.5, y, 2.5, ROW_HEIGHT, "cut"))
    return Markup("<g>{}{}</g>").format(_title(title), Markup("").join(marks))


class _Plot:
    """The coordinates of a plot whose axes begin at 0."""

    def __init__(self, top: float, right: float = 1.0) -> None:
        self._top, self._right = top, right
        self.width, self.height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + self.width * value / self._right

    def y(self, value: float) -> float:
        return TOP + self.height * (1 - value / self._top)

    def grid(self, ticks: Sequence[float], format: Callable[[float], str], unit: str) -> Markup:
        """Draw horizontal lines with their values, and the unit beside them."""
        parts = []
        for tick in ticks:
            y = self.y(tick)
            line = Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>')
            parts.append(line.format(_number(LEFT), _number(WIDTH - RIGHT), _number(y), _number(y)))
            parts.append(_text(LEFT - 6, y + 4, format(tick), "end"))
        middle = TOP + self.height / 2
        turned = Markup('<text class="unit" transform="translate(13 {}) rotate(-90)" text-anchor="middle">{}</text>')
        return Markup("").join([*parts, turned.format(_number(middle), unit)])

    def times(self) -> Markup:
        """Draw the axis of seconds."""
        step = max(1, round(_round_step(self._right / 4)))
        ticks = range(0, int(self._right) + 1, step)
        labels = [_text(self.x(tick), HEIGHT - BOTTOM + 16, format_seconds(tick), "middle") for tick in ticks]
        labels.append(_text(LEFT + self.width / 2, HEIGHT - 6, "time since the start (minutes:seconds)", "middle"))
        return Markup("").join(labels)


def _ticks(highest: float) -> tuple[float, list[float]]:
    """Choose a round number at or above the highest value, and round steps up to it."""
    step = _round_step((highest or 1.0) / 4)
    count = max(1, math.ceil(highest / step - 1e-9))
    return step * count, [step * number for number in range(count + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)


def _svg(width: float, height: float, description: str, content: Markup) -> Markup:
    frame = '<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    return Markup(frame).format(_number(width), _number(height), description, content)


def _rect(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    rect = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>')
    return rect.format(kind, _number(x), _number(y), _number(max(0.0, width)), _number(height))


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(_number(x), _number(y), anchor, text)


def _title(text: str) -> Markup:
    return Markup("<title>{}</title>").format(text)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
