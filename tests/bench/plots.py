"""Draw the plots of the results that were saved: `python -m bench.plots FOLDER`, with the Python of .venv/peers.

A plot is understood without the page around it: its title asks the question, its axes have units and name the
better end. No background, and a grey that can be read on white and on black, since a README is shown on both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

Result = Mapping[str, Any]

GREY = "#768390"
TITLES = {
    "pgque": "pgque",
    "pgque workers": "pgque workers",
    "by hand": "SKIP LOCKED table",
    "pgqueuer": "pgqueuer",
    "procrastinate": "procrastinate",
}
COLOURS = dict(zip(TITLES, ("#2f81f7", "#2da44e", "#d4a72c", "#e85aad", "#8957e5"), strict=True))
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pgque",  # the same figures give the same file
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
# Names of the loads of peers.json for a reader of the plot alone.
LOADS = {
    "single sends": "send one message a call",
    "sends of 1,000": "send 1,000 messages a call",
    "consume": "receive and acknowledge",
    "worker pool of 1": "1 worker process",
    "worker pool of 4": "4 worker processes",
    "fan-out to 1 consumer": "1 consumer gets all messages",
    "fan-out to": "each gets all messages:",
}
FLUSHED = "fsync on, synchronous_commit on"  # settings of the server, as run.describe() lists them
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")


def _systems(values: Mapping[str, float], key: str) -> dict[str, float]:
    """Return a figure of each system that has one."""
    return {name: values[f"{name}: {key}"] for name in TITLES if f"{name}: {key}" in values}


def _load(name: str) -> str:
    """Return the name of a load for somebody who has read nothing else."""
    for begin, words in LOADS.items():
        if name.startswith(begin):
            return words + name.removeprefix(begin)
    return name


def _finish(figure: Any, file: Path, result: Result) -> None:
    """Write what it was measured on below the figure, and the figure into the file."""
    machine = result["machine"]
    parts = [
        f"pgque {machine['pgque']}",
        machine["server"],
        "each commit flushed to disk" if FLUSHED in machine["settings"] else "",
        machine["cpu"],
        f"{machine['cores']} cores",
        machine.get("date", ""),
    ]
    figure.supxlabel(
        ", ".join(part for part in parts if part) + (" (a quick run: noisy)" if result["quick"] else ""),
        fontsize=9,
    )
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)


def _legend(figure: Any, names: Sequence[str]) -> None:
    handles = [mpl.patches.Patch(color=COLOURS[name], label=TITLES[name]) for name in names]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(names), fontsize=11)


def throughput(result: Result, file: Path) -> None:
    """Bars: messages a second, clean and with xmin held, and for a CPU second of the server."""
    cells: dict[tuple[str, str], Mapping[str, float]] = {}
    for row in result["rows"]:
        load, _, state = row["what"].rpartition(", ")
        cells[load, state] = row["values"]
    loads = list(dict.fromkeys(load for load, _ in cells))[::-1]

    def per_s(values: Mapping[str, float]) -> dict[str, float]:
        return _systems(values, "per_s")

    def per_cpu_s(values: Mapping[str, float]) -> dict[str, float]:
        found = _systems(values, "cpu_s_per_million")
        return {name: 1e6 / seconds for name, seconds in found.items() if seconds}

    panels: list[tuple[str, str, Callable[[Mapping[str, float]], dict[str, float]]]] = [
        ("messages a second", "clean", per_s),
        ("messages a second while a transaction\nof another session stays open", "held xmin", per_s),
        ("messages for one second of\nthe server's CPU", "clean", per_cpu_s),
    ]
    figure, axes = plt.subplots(1, len(panels), sharey=True, figsize=(12, 1.5 + 0.75 * len(loads)))
    for axis, (title, state, of) in zip(axes, panels, strict=True):
        for place, load in enumerate(loads):
            found = of(cells.get((load, state), {}))
            height = 0.8 / max(len(found), 1)
            for n, (name, value) in enumerate(found.items()):
                axis.barh(place + 0.4 - (n + 0.5) * height, value, height * 0.9, color=COLOURS[name])
        axis.set(xscale="log", title=title)
        axis.margins(y=0.01)
        axis.grid(axis="y", visible=False)
        axis.xaxis.set_major_formatter(THOUSANDS)
        axis.xaxis.set_minor_formatter(NullFormatter())
    shown = [axis.get_xlim() for axis in axes[:2]]
    for axis in axes[:2]:
        axis.set_xlim(min(low for low, _ in shown), max(high for _, high in shown))
    axes[0].set_yticks(range(len(loads)), [_load(load) for load in loads])
    figure.supylabel("longer bars are better; the scale is logarithmic", fontsize=9)
    _legend(figure, list(TITLES))
    _finish(figure, file, result)


LATENCIES = (
    ("p50", "half of the messages arrive within"),
    ("p99", "99 of 100 messages arrive within"),
    ("p999", "999 of 1,000 messages arrive within"),
)


def latency(result: Result, file: Path) -> None:
    """Lines: percentiles by the offered rate."""
    figure, axes = plt.subplots(1, 3, sharey=True, figsize=(12, 4.5))
    rates = [row["values"]["rate"] for row in result["rows"]]
    for axis, (key, title) in zip(axes, LATENCIES, strict=True):
        for name in TITLES:
            axis.plot(
                rates, [row["values"][f"{name}: {key}"] for row in result["rows"]], "o-", color=COLOURS[name]
            )
        axis.set(xscale="log", yscale="log", title=title, xlabel="messages sent a second")
        axis.set_xticks(rates, [f"{rate:,}" for rate in rates])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(THOUSANDS)
    axes[0].set_ylabel("milliseconds from send to receive\n(lower is better, logarithmic)")
    _legend(figure, list(TITLES))
    _finish(figure, file, result)


def held_xmin(result: Result, file: Path) -> None:
    """Lines: throughput and dead tuples over time while a transaction holds xmin."""
    series = next((row["series"] for row in result["rows"] if row["series"]), None)
    if series is None:
        return
    figure, (rate, dead) = plt.subplots(1, 2, figsize=(12, 4.5))
    for name, colour in COLOURS.items():
        line = series[f"{name}: per_s"]
        # The last second is not a whole one
        rate.plot([n + 0.5 for n in range(len(line) - 1)], line[:-1], color=colour, lw=1.8)
        dead.plot(series[f"{name}: second"], series[f"{name}: dead"], color=colour, lw=1.8)
    rate.set_title("messages a second out of a backlog\n(higher is better)", pad=20)
    dead.set_title("dead rows that vacuum cannot remove\n(lower is better)", pad=20)
    released = next((line[0] for key, line in series.items() if key.endswith(": released")), None)
    for axis in (rate, dead):
        axis.set(xlabel="seconds", yscale="symlog")
        axis.set_ylim(bottom=0)
        if released is not None:
            axis.axvspan(0, released, color=GREY, alpha=0.12, lw=0)
            for align, offset, words in (
                ("right", -4, "a transaction of another session is open"),
                ("left", 4, "it has ended"),
            ):
                axis.annotate(
                    words,
                    (released, axis.get_ylim()[1]),
                    xytext=(offset, 2),
                    textcoords="offset points",
                    va="bottom",
                    ha=align,
                    color=GREY,
                    fontsize=9,
                )
        axis.yaxis.set_major_formatter(THOUSANDS)
    _legend(figure, list(TITLES))
    _finish(figure, file, result)


def soak(result: Result, file: Path) -> None:
    """Lines: what was sampled over time."""
    lines = {key: line for row in result["rows"] for key, line in row["series"].items()}
    seconds = lines.pop("second")
    panels = (
        ("messages delivered a second", {"per_s": "deliveries"}),
        ("ms from send to receive", {"p50_ms": "half of the messages", "p99_ms": "99 of 100"}),
        ("MB of pgque's tables and indexes", {"mb": "size"}),
        ("dead rows in pgque's tables", {"dead": "dead"}),
        ("WAL bytes for a message", {"wal_per_message": "WAL"}),
        ("server's CPU for a message, µs", {"cpu_us_per_message": "CPU"}),
    )
    figure, axes = plt.subplots(2, 3, sharex=True, figsize=(12, 5.5))
    for axis, (title, keys) in zip(axes.flat, panels, strict=True):
        for (key, label), colour in zip(keys.items(), ("#2f81f7", "#d4a72c"), strict=False):
            axis.plot([second / 60 for second in seconds], lines[key], color=colour, lw=1.5, label=label)
        axis.set(title=title)
        axis.set_ylim(bottom=0, top=max(max(lines[key]) for key in keys) * 1.15 or 1)
        axis.yaxis.set_major_formatter(THOUSANDS)
        if len(keys) > 1:
            axis.legend()
    for axis in axes[1]:
        axis.set_xlabel("minutes")
    _finish(figure, file, result)


PLOTS: dict[str, tuple[str, Callable[[Result, Path], None]]] = {
    "throughput.svg": ("peers.json", throughput),
    "held-xmin.svg": ("drain.json", held_xmin),
    "latency.svg": ("latency.json", latency),
    "soak.svg": ("soak.json", soak),
}


def main() -> None:
    """Draw what there are results for."""
    folder = Path(sys.argv[1])
    with mpl.rc_context(STYLE):
        for name, (source, draw) in PLOTS.items():
            if (folder / source).exists():
                draw(json.loads((folder / source).read_text()), folder / name)


if __name__ == "__main__":
    main()
