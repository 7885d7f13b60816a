"""What a matplotlib figure shows, as E2B's clients read it.

    chart_of(figure) -> {"type", "title", "elements", ...} or None for an empty one

Types: line, scatter, bar, pie, box_and_whisker, superchart (several axes), unknown.
"""

import math
import re

import matplotlib.dates
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.collections import PathCollection
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch, Wedge

LIMIT = 10_000  # points of one chart: more are thinned out, the image shows them all


def chart_of(figure):
    charts = [axes_chart(a) for a in figure.axes if a.has_data()]
    if not charts:
        return None
    if len(charts) == 1:
        return charts[0]
    title = figure._suptitle.get_text() if figure._suptitle else ""
    return {"type": "superchart", "title": title, "elements": charts}


def axes_chart(axes: Axes):
    base = {"title": axes.get_title() or None}
    wedges = [p for p in axes.patches if isinstance(p, Wedge)]
    bars = [c for c in axes.containers if isinstance(c, BarContainer)]
    scatters = [c for c in axes.collections if isinstance(c, PathCollection)]
    if wedges:
        return {"type": "pie", **base, "elements": pie(axes, wedges)}
    boxes = box_elements(axes)
    if boxes:
        return {"type": "box_and_whisker", **base, **labels(axes), "elements": boxes}
    if bars:
        return {"type": "bar", **base, **labels(axes), "elements": [e for c in bars for e in bar(axes, c)]}
    lines = [line for line in axes.lines if len(line.get_xdata(orig=False)) > 1]
    if lines:
        elements = [points(axes, line.get_label(), zip(line.get_xdata(orig=False), line.get_ydata(orig=False))) for line in lines]
        return {"type": "line", **base, **labels(axes), **ticks(axes), "elements": elements}
    if scatters:
        elements = [points(axes, c.get_label(), c.get_offsets().tolist()) for c in scatters]
        return {"type": "scatter", **base, **labels(axes), **ticks(axes), "elements": elements}
    return {"type": "unknown", **base, "elements": []}


def labels(axes):
    x, y = axes.get_xlabel(), axes.get_ylabel()
    return {"x_label": x or None, "y_label": y or None, "x_unit": unit(x), "y_unit": unit(y)}


def unit(label):
    """The unit in "Time (s)" or "Time [s]"."""
    found = re.search(r"[(\[]([^)\]]+)[)\]]\s*$", label)
    return found.group(1) if found else None


def scale(axis):
    if isinstance(axis.get_major_formatter(), (matplotlib.dates.DateFormatter, matplotlib.dates.AutoDateFormatter)):
        return "datetime"
    if type(axis.converter).__name__ == "StrCategoryConverter":
        return "categorical"
    return axis.get_scale()


def ticks(axes):
    found = {}
    for name, axis, limits in (("x", axes.xaxis, axes.get_xlim()), ("y", axes.yaxis, axes.get_ylim())):
        low, high = sorted(limits)
        kind = scale(axis)
        locations = [t for t in axis.get_ticklocs() if low <= t <= high]
        texts = [t.get_text() for t in axis.get_ticklabels()]
        texts = [text for t, text in zip(axis.get_ticklocs(), texts) if low <= t <= high]
        found[f"{name}_ticks"] = [value(t, kind) for t in locations]
        found[f"{name}_tick_labels"] = texts
        found[f"{name}_scale"] = kind
    return found


def value(v, kind="linear"):
    if hasattr(v, "item"):
        v = v.item()
    if kind == "datetime" and isinstance(v, (int, float)):
        return matplotlib.dates.num2date(v).isoformat()
    if isinstance(v, float) and not math.isfinite(v):
        return None
    return v if isinstance(v, (int, float, str, bool)) or v is None else str(v)


def points(axes, label, pairs):
    pairs = list(pairs)
    step = max(1, math.ceil(len(pairs) / LIMIT))
    xs, ys = scale(axes.xaxis), scale(axes.yaxis)
    return {"label": str(label), "points": [[value(x, xs), value(y, ys)] for x, y in pairs[::step]]}


def bar(axes, container):
    group = str(container.get_label())
    horizontal = getattr(container, "orientation", "vertical") == "horizontal"
    axis = axes.yaxis if horizontal else axes.xaxis
    named = {round(float(at), 6): text.get_text() for at, text in zip(axis.get_ticklocs(), axis.get_ticklabels())}
    kind = scale(axis)
    for patch in container.patches[:LIMIT]:
        center = patch.get_y() + patch.get_height() / 2 if horizontal else patch.get_x() + patch.get_width() / 2
        size = patch.get_width() if horizontal else patch.get_height()
        name = named.get(round(float(center), 6)) or str(value(center, kind))
        yield {"label": name, "group": group, "value": value(size)}


def pie(axes, wedges):
    texts = [t.get_text() for t in axes.texts]
    # With percentages each wedge has two texts: its label comes first.
    each = 2 if len(texts) == 2 * len(wedges) else 1
    return [
        {"label": texts[i * each] if i * each < len(texts) else w.get_label(), "angle": value(abs(w.theta2 - w.theta1)), "radius": value(w.r)}
        for i, w in enumerate(wedges)
    ]


def box_elements(axes):
    """boxplot() draws each box as a closed line, or as a patch."""
    boxes = [p.get_path().vertices for p in axes.patches if isinstance(p, PathPatch)]
    lines = [line for line in axes.lines if isinstance(line, Line2D)]
    if not boxes:
        boxes = [line.get_xydata() for line in lines if len(line.get_xdata()) == 5 and tuple(line.get_xydata()[0]) == tuple(line.get_xydata()[-1])]
    elements = []
    names = {round(float(at), 6): t.get_text() for at, t in zip(axes.get_xticks(), axes.get_xticklabels())}
    for box in boxes:
        left, right = min(v[0] for v in box), max(v[0] for v in box)
        center = (left + right) / 2
        inside = [line.get_xydata() for line in lines if len(line.get_xdata()) and all(left - 1e-9 <= x <= right + 1e-9 for x in line.get_xdata())]
        flat = [v for v in inside if len(v) == 2 and v[0][1] == v[1][1] and v[0][0] != v[1][0]]
        median = [v[0][1] for v in flat if abs(v[0][0] - left) < 1e-9 and abs(v[1][0] - right) < 1e-9]
        caps = [v[0][1] for v in flat if not (abs(v[0][0] - left) < 1e-9 and abs(v[1][0] - right) < 1e-9)]
        first, third = min(v[1] for v in box), max(v[1] for v in box)
        outliers = [y for line in lines if line.get_linestyle() == "None" for x, y in line.get_xydata() if abs(x - center) < 1e-6]
        elements.append({
            "label": names.get(round(float(center), 6), str(value(center))),
            "min": value(min(caps, default=first)), "first_quartile": value(first), "median": value(median[0] if median else None),
            "third_quartile": value(third), "max": value(max(caps, default=third)), "outliers": [value(y) for y in outliers],
        })
    return elements
