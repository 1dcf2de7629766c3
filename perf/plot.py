"""Plots of results: time against size with the floor in it, and the roofline."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from perf.runs import Run

STYLE = {
    "operator": {"color": "tab:blue", "marker": "o", "zorder": 3},
    "fill": {"color": "black", "linestyle": "--"},
    "copy": {"color": "dimgray", "linestyle": "--"},
    "launch": {"color": "silver", "linestyle": ":"},
    "torch": {"color": "tab:red", "marker": "x"},
    "compile": {"color": "tab:orange", "marker": "x"},
    "cufft": {"color": "tab:green", "marker": "x"},
}


def times(run: Run, path: Path) -> Path:
    """Writes the PNG of time against bytes; returns its path."""
    figure = times_figure(run)
    figure.savefig(path, dpi=130)
    return path


def times_figure(run: Run) -> Any:
    """Time against the least bytes, both logarithmic: the operator with its spread, rivals, floors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for name, style in STYLE.items():
        rows = sorted((r for r in run.rows if name in r.times), key=lambda r: r.read + r.written)
        if not rows:
            continue
        x = [(r.read + r.written) / 1e6 for r in rows]
        y = [r.times[name].median for r in rows]
        axes.plot(x, y, label=run.op if name == "operator" else name, markersize=4, **style)
        axes.fill_between(
            x, [r.times[name].low for r in rows], [r.times[name].high for r in rows], color=style["color"], alpha=0.2
        )
    axes.set(xscale="log", yscale="log", xlabel="least bytes read and written, MB", ylabel="GPU time, cold L2, us")
    axes.set_title(f"{run.title()}: {run.machine.get('gpu', '')}, {run.machine['date']}", fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    return figure


def roofline_figure(run: Run, bandwidth: float, peak: float, unit: str) -> Any:
    """Operations a second against operations a byte. `bandwidth` in bytes/s, `peak` in operations/s of `unit`, a key of
    the rows ("mma" or "fp32")."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    rows = [r for r in run.rows if getattr(r, unit)]
    intensity = [getattr(r, unit) / (r.read + r.written) for r in rows]
    rate = [getattr(r, unit) / r.times["operator"].median / 1e6 for r in rows]  # TFLOP/s
    edges = [min(*intensity, peak / bandwidth) / 3, peak / bandwidth, max(*intensity, peak / bandwidth) * 3]
    axes.plot(edges, [min(e * bandwidth, peak) / 1e12 for e in edges], color="black", label="roofline")
    axes.scatter(intensity, rate, s=18, color="tab:blue", label=run.op)
    for row, x, y in zip(rows, intensity, rate, strict=True):
        axes.annotate(row.name, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel=f"{unit} operations a byte", ylabel="TFLOP/s")
    axes.set_title(f"{run.title()}: roofline, {run.machine.get('gpu', '')}", fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    return figure


def bars_figure(labels: list[str], parts: dict[str, list[float]], title: str, ylabel: str) -> Any:
    """Stacked bars: one for each label, one colour for each part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 0.45 * len(labels) + 3), 4.6), layout="constrained")
    axes = figure.subplots()
    base = [0.0] * len(labels)
    for name, values in parts.items():
        axes.bar(labels, values, bottom=base, label=name)
        base = [b + v for b, v in zip(base, values, strict=True)]
    axes.tick_params(axis="x", rotation=75, labelsize=7)
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(ylabel)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def lines_figure(labels: list[str], lines: dict[str, list[float]], title: str, ylabel: str) -> Any:
    """One line for each name over the labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 0.45 * len(labels) + 3), 4.6), layout="constrained")
    axes = figure.subplots()
    for name, values in lines.items():
        axes.plot(labels, values, marker="o", markersize=3, label=name)
    axes.tick_params(axis="x", rotation=75, labelsize=7)
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(ylabel)
    axes.grid(True, alpha=0.25)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def embedded(figure: Any) -> str:
    """The figure as a data URI, for a page that stands alone."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
