"""Results as Markdown tables, JSON and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def markdown(rows: Sequence[Mapping[str, Any]], without: Sequence[str] = ("histogram",)) -> str:
    """A Markdown table with a column per key of the first row."""
    names = [name for name in rows[0] if name not in without]
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |"]
    lines.append("| " + " | ".join("---" if isinstance(rows[0][name], str) else "---:" for name in names) + " |")
    lines += ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return " to ".join(_cell(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def save(folder: Path, name: str, about: Mapping[str, Any], rows: Any) -> Path:
    """``folder/name.json`` with the rows and what they were measured on."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")
    return path


def plot(folder: Path, name: str, kind: str, rows: Any) -> Path | None:
    """``folder/name.png``, drawn as a measurement of this kind; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw = {"compression": _compression, "picture": _picture, "load": _load, "overhead": _overhead, "memory": _memory}
    figure, axes = pyplot.subplots(figsize=(7.2, 3.8))
    draw[kind](axes, rows)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _compression(axes: Any, rows: Any) -> None:
    """The paper's histogram: how many tokens a forward pass commits."""
    most = 16
    for row in (rows[0], rows[-1]):
        total = sum(row["histogram"].values())
        counts = [row["histogram"].get(str(count), 0) / total for count in range(1, most)]
        counts.append(sum(n for count, n in row["histogram"].items() if int(count) >= most) / total)
        axes.step(range(1, most + 1), counts, where="mid", label=f"{row['setting']}: {row['tokens_per_forward']:.2f}")
    axes.set(xlabel=f"tokens of a forward pass ({most} = {most} or more)", ylabel="share of passes", ylim=(0, None))
    axes.legend(frameon=False)


def _picture(axes: Any, rows: Any) -> None:
    names = [row["setting"] for row in rows]
    axes.barh(names, [row["speed_up"] for row in rows], color="tab:blue")
    for index, row in enumerate(rows):
        axes.text(row["speed_up"], index, f" {row['speed_up']:.2f} × ({row['seconds']:.2f} s)", va="center")
    axes.axvline(1, color="grey", linewidth=0.8, linestyle=":")
    axes.invert_yaxis()
    axes.set(xlabel=f"speed-up over “{names[0]}”", xlim=(0, 1.3 * max(row["speed_up"] for row in rows)))


def _load(axes: Any, rows: Any) -> None:
    for name in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == name]
        axes.plot([r["concurrency"] for r in mine], [r["against_first"] for r in mine], marker="o", label=name)
    places = sorted({row["concurrency"] for row in rows})
    axes.set(xscale="log", xlabel="pictures in flight", ylabel=f"pictures per minute / “{rows[0]['setting']}”")
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.legend(frameon=False)


def _overhead(axes: Any, rows: Any) -> None:
    parts = [name for name in rows[0] if name.endswith("_ms") and name != "step_ms"]
    below = [0.0] * len(rows)
    places = [str(row["pictures_at_once"]) for row in rows]
    for part in parts:
        shares = [row[part] / row["step_ms"] for row in rows]
        axes.bar(places, shares, bottom=below, label=part.removesuffix("_ms").replace("_", " "))
        below = [b + s for b, s in zip(below, shares, strict=True)]
    axes.set(xlabel="pictures at once", ylabel="share of a step")
    axes.legend(frameon=False, fontsize=8, ncols=1, loc="center left", bbox_to_anchor=(1, 0.5))


def _memory(axes: Any, rows: Any) -> None:
    axes.plot([row["requests"] for row in rows], [row["resident_mib"] for row in rows], marker=".")
    axes.set(xlabel="pictures drawn", ylabel="resident memory, MiB", ylim=(0, None))
