"""Draws the loss of the demo's two runs over each other."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from keras_monitored import demo_training as training

_GREY, _BLUE, _ORANGE, _RED = "#c2c7cd", "#1f5fa8", "#e07b1a", "#b3202c"


class Losses(NamedTuple):
    """The loss by step, of the run that nothing happened to and of the one that was killed."""

    unbroken: dict[int, float]
    before_kill: dict[int, float]
    after_kill: dict[int, float]


def draw_losses(losses: Losses, path: Path) -> None:
    """Draws the loss of every step, the whole training on the left and the steps about the kill on the right.

    Args:
        losses: Of both runs.
        path: The PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    unbroken, before, after = losses
    killed, resumed = max(before), min(after) - 1
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    whole, near = figure.subplots(1, 2, width_ratios=(3, 2))
    for axes, mark in ((whole, ""), (near, "o")):
        axes.plot(*_xy(unbroken), color=_GREY, linewidth=6, solid_capstyle="round", label="unbroken run")
        axes.plot(
            *_xy(before), color=_BLUE, linewidth=2.4, marker=mark, markersize=7, label="killed run, up to the kill"
        )
        axes.plot(
            *_xy(after), color=_ORANGE, linewidth=1.2, marker=mark, markersize=3.5, label="the same run, started again"
        )
        axes.axvline(killed, color=_RED, linewidth=1.2)
        axes.axvline(resumed, color=_RED, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(f"step (batches of {training.BATCH_SIZE} digits)")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    near.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2])
    whole.set_ylabel("cross-entropy of the step's batch (nats)")
    whole.set_title("Whole training", loc="left")
    whole.legend(frameon=False)
    near.set_title("About the kill", loc="left")
    near.set_xlim(resumed - 7, killed + 8)
    shown = [loss for step, loss in unbroken.items() if resumed - 7 <= step <= killed + 8]
    near.set_ylim(min(shown) / 1.3, max(shown) * 2)
    top = near.get_ylim()[1] / 1.12
    near.text(killed + 0.3, top, f"killed after\nstep {killed}", color=_RED, va="top")
    near.text(resumed - 0.3, top, f"goes on after\nstep {resumed}", color=_RED, va="top", ha="right")
    figure.suptitle("Loss of each step: a training that was killed and started again, over an unbroken one")
    figure.savefig(path, dpi=130)


def _xy(losses: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(losses), list(losses.values())
