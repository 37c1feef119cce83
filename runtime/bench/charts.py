"""Figures of the benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trtllm_forespark.runtime.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def by_context(runs: list[dict[str, Any]]) -> Figure:
    """runs of `bench context`: drafting time, and the state a request takes, by context length."""
    figure = new_figure(9.0, 3.9)
    axes = figure.subplots(1, 2)
    drafters = list(dict.fromkeys(r["drafter"] for r in runs))
    batches = sorted({r["batch"] for r in runs})
    for number, drafter in enumerate(drafters):
        colour = f"C{number}"
        for batch, style in zip(batches, ("-", "--", ":", "-."), strict=False):
            mine = [r for r in runs if r["drafter"] == drafter and r["batch"] == batch]
            contexts = [r["context"] for r in mine]
            label = f"{drafter}, batch {batch}"
            axes[0].plot(
                contexts, [r["draft_seconds"] * 1e3 for r in mine], style, color=colour, marker="o", label=label
            )
        mine = [r for r in runs if r["drafter"] == drafter and r["batch"] == batches[0]]
        contexts = [r["context"] for r in mine]
        axes[1].plot(contexts, [r["state_bytes"] / 2**20 for r in mine], color=colour, marker="o", label=drafter)
    for ax, title in zip(axes, ("a draft pass, ms", "drafter state of a request, MiB"), strict=True):
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("context, tokens")
        ax.set_xscale("log", base=2)
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8, frameon=False)
        ticks = sorted({r["context"] for r in runs})
        ax.set_xticks(ticks, [str(t) for t in ticks])
    return figure
