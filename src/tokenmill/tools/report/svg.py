"""Plots as hand-written SVG. The page must load nothing, and a plotting library is an extra that few users install.

Colours come from the style sheet by class, so that plots follow the theme of the page. Every mark has a title, which
browsers show as a tooltip, and every plot has a description for screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from tokenmill.formatting import format_seconds, plural
from tokenmill.tools.inspect.statistics import LengthCount, cover_lengths
from tokenmill.tools.report.figures import DrawnRow, DrawnSegment

__all__ = ["draw_lengths", "draw_lines", "draw_rows", "draw_share", "format_share"]

WIDTH, HEIGHT = 480.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 12.0, 12.0, 46.0
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
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
    bars = [_rect(0, 0, 100, 8, "track"), _rect(0, 0, max(0.0, min(1.0, share)) * 100, 8, "fill")]
    frame = {"class": "share", "viewBox": "0 0 100 8", "preserveAspectRatio": "none", "aria-hidden": "true"}
    return _element("svg", frame, *bars)


def draw_lengths(bins: Sequence[LengthCount], name: str, beside: Sequence[Sequence[LengthCount]] = ()) -> Markup:
    """Draw two bars for each bin of lengths: its share of the documents, and of the tokens.

    `beside` are the bins of plots that are to be compared with this one, and have the same axes.
    """
    every = [some for some in (bins, *beside) if some]
    bins = cover_lengths(bins, min(some[0].start for some in every), max(some[-1].stop for some in every))
    shares = _shares(bins)
    top, ticks = _ticks(max(max(pair) for some in every for pair in _shares(some)))
    parts = _grid(top, ticks, lambda value: f"{100 * value:.3g}%", "share")
    step = INNER_WIDTH / max(1, len(bins))
    thickness = max(1.0, min(14.0, step * 0.4))
    for place, (some, pair) in enumerate(zip(bins, shares, strict=True)):
        middle = LEFT + (place + 0.5) * step
        title = (
            f"{_range(some)} tokens: {plural(some.num_documents, 'document')} ({format_share(pair[0])}), "
            f"{plural(some.num_tokens, 'token')} ({format_share(pair[1])})"
        )
        # The tooltip covers the whole column, because low bars are hard to hit.
        marks = [_rect(LEFT + place * step, TOP, step, INNER_HEIGHT, "hover")]
        for x, share, kind in ((middle - thickness, pair[0], "documents"), (middle, pair[1], "tokens")):
            y = _height(share, top)
            marks.append(_rect(x, y, thickness, TOP + INNER_HEIGHT - y, kind))
        parts.append(_titled(title, *marks))
    parts += _label_below(_length_labels(bins, step), "tokens in a document")
    description = f"Histogram of document lengths of {name}, from {bins[0].start:,} to {bins[-1].stop - 1:,} tokens"
    return _svg(HEIGHT, description, parts)


def _shares(bins: Sequence[LengthCount]) -> list[tuple[float, float]]:
    """The share of each bin in all documents, and in all tokens."""
    num_documents = sum(some.num_documents for some in bins) or 1
    num_tokens = sum(some.num_tokens for some in bins) or 1
    return [(some.num_documents / num_documents, some.num_tokens / num_tokens) for some in bins]


def _length_labels(bins: Sequence[LengthCount], step: float) -> list[tuple[float, str]]:
    """Label each bin at its middle, or some powers of two at the start of their bins."""
    if len(bins) <= MOST_LABELS:
        return [(LEFT + (place + 0.5) * step, _range(some)) for place, some in enumerate(bins)]
    powers = [(place, some.start) for place, some in enumerate(bins) if some.start & (some.start - 1) == 0]
    thinned = powers[:: max(1, math.ceil(len(powers) / MOST_LABELS))]
    return [(LEFT + place * step, f"{start:,}") for place, start in thinned]


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

    def across(time: float) -> float:
        return LEFT + INNER_WIDTH * time / seconds

    times = range(0, int(seconds) + 1, max(1, round(_round_step(seconds / 4))))
    labels = [(across(time), format_seconds(time)) for time in times]
    parts = [*_grid(top, ticks, format, unit), *_label_below(labels, "time since the start (minutes:seconds)")]
    if limit is not None:
        parts.append(_titled(f"limit {format(limit)}", _line(_height(limit, top), "limit")))
    for line in lines:
        points = [(_number(across(x)), _number(_height(y, top))) for x, y in line]
        # A line of one point has no length; a second point at the same place makes its round caps visible.
        path = " ".join(f"{x},{y}" for x, y in (points * 2 if len(points) == 1 else points))
        parts.append(_element("polyline", {"class": f"line {kind}", "points": path}))
        for (x, y), (at, value) in zip(points, line, strict=True):
            title = _element("title", {}, f"{format(value)} {unit} at {format_seconds(at)}")
            parts.append(_element("circle", {"class": "dot", "cx": x, "cy": y, "r": 5}, title))
    return _svg(HEIGHT, description, parts)


def draw_rows(rows: Sequence[DrawnRow], seq_len: int, name: str) -> Markup:
    """Draw rows: documents in two alternating shades, marks where they are cut, and padding."""
    height = TOP + len(rows) * ROW_PITCH + 34
    width = WIDTH - ROW_LABEL - RIGHT
    parts: list[Markup] = []
    for place, row in enumerate(rows):
        parts += _draw_row(row, TOP + place * ROW_PITCH, seq_len, width / seq_len)
    base = TOP + len(rows) * ROW_PITCH + 10
    parts.append(_text(ROW_LABEL - 8, base, "row", "end"))
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        parts.append(_text(ROW_LABEL + share * width, base, f"{int(share * seq_len):,}", anchor))
    parts.append(_text(ROW_LABEL + width / 2, base + 16, "token of the row", "middle"))
    description = f"{len(rows)} rows of {seq_len:,} tokens under {name}: documents, cuts and padding"
    return _svg(height, description, parts)


def _draw_row(row: DrawnRow, y: float, seq_len: int, scale: float) -> list[Markup]:
    parts = [_text(ROW_LABEL - 8, y + ROW_HEIGHT - 2, f"{row.number:,}", "end")]
    parts += [_draw_segment(segment, number, y, scale) for number, segment in enumerate(row.segments)]
    used = sum(segment.num_tokens for segment in row.segments)
    rest = seq_len - used - row.num_more_tokens
    for count, kind, title in (
        (row.num_more_tokens, "more", plural(row.num_more_documents, "more document")),
        (rest, "padding", f"padding, {plural(rest, 'token')}"),
    ):
        if count:
            parts.append(_titled(title, _rect(ROW_LABEL + used * scale, y, count * scale, ROW_HEIGHT, kind)))
            used += count
    return parts


def _draw_segment(segment: DrawnSegment, number: int, y: float, scale: float) -> Markup:
    x, width = ROW_LABEL + segment.start * scale, segment.num_tokens * scale
    cuts = [name for name, is_cut in (("begins", segment.is_cut_before), ("ends", segment.is_cut_behind)) if is_cut]
    where = f"; {' and '.join(cuts)} in another row" if cuts else ""
    title = f"document {segment.document:,}, {plural(segment.num_tokens, 'token')} from {segment.start:,}{where}"
    marks = [_rect(x, y, max(1.0, width), ROW_HEIGHT, "even" if number % 2 == 0 else "odd")]
    if segment.is_cut_before:
        marks.append(_rect(x, y, 2.5, ROW_HEIGHT, "cut"))
    if segment.is_cut_behind:
        marks.append(_rect(x + width - 2.5, y, 2.5, ROW_HEIGHT, "cut"))
    return _titled(title, *marks)


def _height(value: float, top: float) -> float:
    """The vertical coordinate of a value on an axis from 0 to `top`."""
    return TOP + INNER_HEIGHT * (1 - value / top)


def _grid(top: float, ticks: Sequence[float], format: Callable[[float], str], unit: str) -> list[Markup]:
    """Draw horizontal lines with their values, and the unit beside them."""
    parts = []
    for tick in ticks:
        y = _height(tick, top)
        parts += [_line(y, "grid"), _text(LEFT - 6, y + 4, format(tick), "end")]
    turned = f"translate(13 {_number(TOP + INNER_HEIGHT / 2)}) rotate(-90)"
    return [*parts, _element("text", {"class": "unit", "transform": turned, "text-anchor": "middle"}, unit)]


def _label_below(labels: Sequence[tuple[float, str]], axis: str) -> list[Markup]:
    """Write labels at their horizontal coordinates below a plot, and what the axis shows below them."""
    parts = [_text(x, HEIGHT - BOTTOM + 16, label, "middle") for x, label in labels]
    return [*parts, _text(LEFT + INNER_WIDTH / 2, HEIGHT - 6, axis, "middle")]


def _ticks(highest: float) -> tuple[float, list[float]]:
    """Choose a round number at or above the highest value, and round steps up to it."""
    step = _round_step((highest or 1.0) / 4)
    count = max(1, math.ceil(highest / step - 1e-9))
    return step * count, [step * number for number in range(count + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)


def _svg(height: float, description: str, parts: Sequence[Markup]) -> Markup:
    view = f"0 0 {_number(WIDTH)} {_number(height)}"
    return _element("svg", {"class": "plot", "viewBox": view, "role": "img", "aria-label": description}, *parts)


def _rect(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    return _element("rect", {"class": kind, "x": x, "y": y, "width": max(0.0, width), "height": height})


def _line(y: float, kind: str) -> Markup:
    return _element("line", {"class": kind, "x1": LEFT, "x2": WIDTH - RIGHT, "y1": y, "y2": y})


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return _element("text", {"x": x, "y": y, "text-anchor": anchor}, text)


def _titled(title: str, *marks: Markup) -> Markup:
    return _element("g", {}, _element("title", {}, title), *marks)


def _element(name: str, attributes: Mapping[str, float | str], *content: str) -> Markup:
    """An element of SVG; text that is not `Markup` is escaped."""
    shown = ((key, value if isinstance(value, str) else _number(value)) for key, value in attributes.items())
    start = Markup("<") + name + Markup("").join(Markup(' {}="{}"').format(key, value) for key, value in shown)
    return start + (Markup(">{}</{}>").format(Markup("").join(content), name) if content else Markup("/>"))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
