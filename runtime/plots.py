"""The calibration report as pictures: reliability diagrams and the predicted length (figure 12a of the paper)."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_forespark.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "no plots: matplotlib is missing; pip install 'trtllm-forespark[train]'"
PHASES = {"before": "#d9822b", "after": "#1f5f99"}
DPI, COLOURS = 100, 32
TICKS = ["0", ".25", ".5", ".75", "1"]


def draw(report: dict[str, Any], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Write the three PNGs of a calibration report into ``folder``; returns their paths.

    report: as `judge` makes it or calibration_report.json holds it. Without matplotlib nothing is written, and ``say``
    is told which extra has it.
    """
    if not available(say):
        return []
    figures = {
        "reliability_pre_draft.png": reliability(
            "Pre-draft estimate: conditional acceptance, drafts of every length",
            report["source"],
            report["pre_draft_by_position"],
            report["survival"]["pre_draft"],
        ),
        "reliability_post_draft.png": reliability(
            "Post-draft estimate: conditional acceptance, drafts of full length",
            report["source"],
            report["post_draft"],
            report["survival"]["post_draft"],
        ),
        "predicted_length.png": length_bars(report["predicted_length"]),
    }
    for name, figure in figures.items():
        save(figure, folder / name)
    return [folder / name for name in figures]


def available(say: Callable[[str], None]) -> bool:
    """Whether figures can be drawn; where not, ``say`` is told which extra has what is missing."""
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError:
        say(MISSING)
        return False
    return True


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    write_bytes(path, png(figure))


def reliability(title: str, source: str, positions: list[dict[str, Any]], survival: list[dict[str, Any]]) -> Figure:
    """One panel a position: share accepted over predicted probability, and below it how many cases lie in every bin."""
    most, width, height = (4, 3.0, 3.3) if len(positions) <= 8 else (5, 2.4, 2.75)  # panels a row; inches of one
    columns = min(most, len(positions))
    rows = -(-len(positions) // columns)
    figure = new_figure(max(width * columns, 6.0), 0.9 + height * rows)
    grid = figure.add_gridspec(rows, columns)
    for place, (scores, whole) in enumerate(zip(positions, survival, strict=True)):
        inner = grid[divmod(place, columns)].subgridspec(2, 1, height_ratios=(4, 1))
        upper, lower = figure.add_subplot(inner[0]), figure.add_subplot(inner[1])
        curves(upper, scores)
        counts(lower, scores)
        upper.set_title(f"position {scores['j']}: ECE {change(scores)}\n(of survival {change(whole)})", fontsize=8.5)
        if place % columns == 0:
            upper.set_ylabel("share accepted", fontsize=8)
            lower.set_ylabel("cases", fontsize=8)
    figure.suptitle(f"{title}\ncalibrated on {source}", fontsize=10.5)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def change(scores: dict[str, Any]) -> str:
    return " → ".join("–" if s is None else f"{s:.3f}" for s in (scores["ece_before"], scores["ece_after"]))


def curves(axes: Axes, scores: dict[str, Any]) -> None:
    """Share accepted over mean prediction, bin by bin; the larger a dot, the more cases it stands for."""
    axes.plot([0, 1], [0, 1], color="0.75", linewidth=1, label="accepted as predicted")
    for when, colour in PHASES.items():
        curve = scores["bins"][when]
        filled = [i for i, count in enumerate(curve["count"]) if count]
        x, y, n = ([curve[key][i] for i in filled] for key in ("predicted", "happened", "count"))
        axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.5)
        sizes = [6 + 44 * count / max(n) for count in n]
        axes.scatter(x, y, sizes, color=colour, label=f"{when} calibration", zorder=3, clip_on=False)
    if not scores["count"]:
        axes.text(0.5, 0.5, "no draft got here", ha="center", va="center", fontsize=9, color="0.4")
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], TICKS)
    over_probability(axes, [])


def counts(axes: Axes, scores: dict[str, Any]) -> None:
    """How many cases lie in every bin; the axis names the most."""
    bins = len(scores["bins"]["after"]["count"])
    for side, (when, colour) in zip((-1, 1), PHASES.items(), strict=True):
        middle = [(i + 0.5 + 0.22 * side) / bins for i in range(bins)]
        axes.bar(middle, scores["bins"][when]["count"], width=0.44 / bins, color=colour)
    most = max(max(scores["bins"][when]["count"]) for when in PHASES)
    axes.set_ylim(0, max(most, 1))
    axes.set_yticks([most], [f"{most:,}"])
    axes.set_xlabel(f"predicted ({scores['count']:,} cases)", fontsize=8)
    over_probability(axes, TICKS)


def over_probability(axes: Axes, labels: list[str]) -> None:
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], labels)
    axes.tick_params(labelsize=7.5, length=2)
    axes.spines[["top", "right"]].set_visible(False)


def length_bars(predicted: dict[str, Any]) -> Figure:
    """Share of drafts whose predicted accepted length is at most 0, 1 and 2 tokens off, by both predictors."""
    figure = new_figure(6.4, 4.0)
    axes = figure.add_subplot()
    for key, name, colour, side in (
        ("pre_draft", "pre-draft estimate", PHASES["after"], -1),
        ("previous_step", "previous step's acceptance", "#8a8f98", 1),
    ):
        shares = [predicted[key][f"within_{k}"] for k in (0, 1, 2)]
        error = predicted[key]["mean_absolute_error"]
        label = f"{name} (mean error {'–' if error is None else f'{error:.2f}'} tokens)"
        bars = axes.bar([k + 0.2 * side for k in range(3)], [s or 0 for s in shares], 0.38, color=colour, label=label)
        axes.bar_label(bars, ["–" if s is None else f"{s:.0%}" for s in shares], fontsize=9, padding=2)
    axes.set_xticks(range(3), ["exact", "within 1 token", "within 2 tokens"])
    axes.set_ylim(0, 1.1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.set_ylabel("share of drafts")
    axes.set_title(f"Accepted length of full-length drafts, predicted ({predicted['drafts']:,} drafts)", fontsize=10.5)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Inches, Agg. Made without pyplot, which would keep every figure and look for a window system."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    """The file's bytes, with a small palette: a third of full colour, and no less legible."""
    from PIL import Image

    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    picture = Image.open(out).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    out = io.BytesIO()
    picture.save(out, format="PNG", optimize=True)
    return out.getvalue()
