"""The report's plots as plain Plotly figures ({"data", "layout"}). Colours of text and grid are the page's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from shardmill.report.data import Rows, Timeline

Figure = dict[str, Any]

# One hue a series, readable on white and on near-black.
COLOURS = (
    "#3b82f6",
    "#f59e0b",
    "#10b981",
    "#ef4444",
    "#8b5cf6",
    "#06b6d4",
    "#ec4899",
    "#84cc16",
    "#f97316",
    "#64748b",
)
_GOOD, _NEUTRAL, _LOSS = "#10b981", "#3b82f6", "#ef4444"
_SIDE = "#94a3b8"
_ASIDE = {"joined": "joined to another", "duplicates": "duplicates", "beyond_limit": "beyond the limit"}


def flow(accounting: dict[str, Any], rejected: Rows, failed: Rows, reused: dict[str, int]) -> Figure:
    """Records to rows from top to bottom: a bar for what is left at each stage, and between them one for each loss.

    `reused`: rows by the other build that they were taken from; they and those made here stand under the last bar.
    """
    steps: list[tuple[str, int, int, str]] = []  # name, where the bar begins, its length, colour

    def stage(name: str, count: int, colour: str) -> None:
        steps.append((name, 0, count, colour))

    def lose(losses: list[tuple[str, int, str]], left: int) -> None:
        for name, count, colour in losses:
            left -= count
            steps.append((name, max(left, 0), count, colour))

    stage("<b>records</b>", accounting["records"], _NEUTRAL)
    aside = [(name, accounting[key], _SIDE) for key, name in _ASIDE.items() if accounting[key]]
    lose(
        [*aside, *((f"rejected: {_words(row['reason'])}", row["rows"], _LOSS) for row in rejected)],
        accounting["records"],
    )
    stage("<b>conversations</b>", accounting["conversations"], _NEUTRAL)
    stage("<b>prompts</b>", accounting["prompts"], _NEUTRAL)
    lost = [(f"failed: {_words(row['reason'])}", row["rows"], _LOSS) for row in failed]
    if accounting["not_reached"]:
        lost.append(("not reached", accounting["not_reached"], _SIDE))
    lose(lost, accounting["prompts"])
    stage("<b>training rows</b>", accounting["ok"], _GOOD)
    if reused:
        sources = [("made here", accounting["ok"] - sum(reused.values())), *reused.items()]
        begin = 0
        for name, count in sources:
            steps.append((name if name == "made here" else f"from {name}", begin, count, _SIDE))
            begin += count
    names, begins, counts, colours = zip(*steps, strict=True)
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "base": begins,
        "x": counts,
        # The outline keeps a loss of one in a million visible.
        "marker": {"color": colours, "line": {"color": colours, "width": 1.5}},
        "text": [f"{count:,}" for count in counts],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    most = max(accounting["records"], accounting["prompts"], 1)
    return {
        "data": [bars],
        "layout": {
            "height": 30 * len(steps) + 50,
            "margin": {"l": 8, "r": 64, "t": 22, "b": 8},
            "bargap": 0.35,
            "xaxis": {"range": [0, most], "tickformat": "~s", "side": "top", "tickangle": 0, "nticks": 5},
            "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
            "showlegend": False,
        },
    }


def histogram(lengths: dict[str, Any], colour: str) -> Figure:
    width, counts = lengths["width"], lengths["counts"]
    edges = [index * width for index in range(len(counts))]
    bars = {
        "type": "bar",
        "x": [edge + width / 2 for edge in edges],
        "y": counts,
        "width": width * 0.94,
        "marker": {"color": colour},
        "customdata": [f"{edge:,} to {edge + width - 1:,}" for edge in edges[:-1]] + [f"{edges[-1]:,} and more"],
        "hovertemplate": "%{customdata} tokens: %{y:,} rows<extra></extra>",
    }
    reach = len(counts) * width
    lines = [_line_at(lengths["p50"], "solid"), _line_at(lengths["p95"], "dot")]
    notes = [_note_at(lengths["p50"], "median", 1.0, reach), _note_at(lengths["p95"], "95%", 0.88, reach)]
    if lengths["p95"] - lengths["p50"] < reach * 0.02:
        lines, notes = lines[:1], [_note_at(lengths["p50"], "median = 95%", 1.0, reach)]
    return {
        "data": [bars],
        "layout": {
            "xaxis": {"title": {"text": "tokens"}, "range": [0, reach], "tickformat": "~s"},
            "yaxis": {"title": {"text": "rows"}},
            "showlegend": False,
            "shapes": lines,
            "annotations": notes,
        },
    }


def accept_by_length(rows: Rows) -> Figure:
    names = [_span(row["length"]) for row in rows]
    means = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "mean",
        "x": names,
        "y": [row["mean"] for row in rows],
        "customdata": [row["rows"] for row in rows],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [row["p90"] - row["mean"] for row in rows],
            "arrayminus": [row["mean"] - row["p10"] for row in rows],
            "thickness": 1,
            "width": 4,
        },
        "marker": {"color": COLOURS[4], "size": 9},
        "line": {"color": COLOURS[4]},
        "hovertemplate": "%{x} tokens: accept length %{y:.2f} over %{customdata:,} rows<extra></extra>",
    }
    return {
        "data": [means],
        "layout": {
            "xaxis": {"title": {"text": "tokens of prompt and answer"}, "type": "category"},
            "yaxis": {"title": {"text": "tokens a step"}, "rangemode": "tozero"},
            "showlegend": False,
        },
    }


def rates(timeline: Timeline) -> Figure:
    return _over_time(timeline, timeline.tokens_per_s, "tokens a second", "%{y:,.0f} tokens/s", stack=True)


def failures_over_time(timeline: Timeline) -> Figure:
    return _over_time(timeline, timeline.failures, "failed prompts", "%{y:,} failed", bars=True)


def accept_over_time(timeline: Timeline) -> Figure:
    return _over_time(timeline, timeline.accept_length, "tokens a step", "accept length %{y:.2f}")


def _over_time(
    timeline: Timeline, series: Any, title: str, hover: str, *, stack: bool = False, bars: bool = False
) -> Figure:
    count = max((len(values) for values in series.values()), default=0)
    times = [_time(timeline.start + (index + 0.5) * timeline.width) for index in range(count)]
    traces = []
    for index, (name, values) in enumerate(sorted(series.items())):
        colour = COLOURS[index % len(COLOURS)]
        trace: dict[str, Any] = {
            "name": name,
            "x": times,
            "y": values,
            "hovertemplate": f"{hover}<extra>%{{fullData.name}}</extra>",
        }
        if bars:
            trace |= {"type": "bar", "marker": {"color": colour}}
        else:
            trace |= {"type": "scatter", "mode": "lines", "line": {"color": colour, "width": 1.5}, "connectgaps": True}
        if stack:
            trace |= {"stackgroup": "servers", "fillcolor": _faint(colour)}
        traces.append(trace)
    return {
        "data": traces,
        "layout": {
            "xaxis": {"type": "date", "tickangle": 0, "nticks": 6},
            "yaxis": {"title": {"text": title}, "rangemode": "tozero"},
            "barmode": "stack",
            "showlegend": len(traces) > 1,
            "hovermode": "x unified",
        },
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _span(length: int) -> str:
    return f"{_round(length)}–{_round(2 * length)}"


def _round(number: int) -> str:
    return f"{number // 1024}K" if number >= 1024 else str(number)


def _line_at(x: float, dash: str) -> dict[str, Any]:
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 1.5, "dash": dash}}


def _note_at(x: float, name: str, y: float, reach: float) -> dict[str, Any]:
    """Beside the line at `x`, on the side where there is room for it."""
    side, shift = ("left", 4) if x < 0.6 * reach else ("right", -4)
    text = f"{name} {x:,.0f}"
    return {"x": x, "y": y, "yref": "paper", "text": text, "showarrow": False, "xanchor": side, "xshift": shift}


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.35)"


def _words(reason: str) -> str:
    return reason.replace("_", " ")
