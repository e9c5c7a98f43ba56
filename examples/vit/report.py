"""The table and the picture at the end of the example."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
from history import History
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

COLOURS = {"fp32": "#444444", "bf16": "#1f77b4", "fp16": "#d9480f"}
DASHES = ("-", "--", ":", "-.")  # lines that lie on each other stay visible
WINDOW = 25  # steps in the running mean of the loss


def make_console() -> Console:
    """A console that is wide enough for the bar and the table where there is no terminal, as in a log file."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def print_table(histories: list[History], title: str) -> None:
    """One row per run."""
    table = Table(title=title)
    table.add_column("precision", style="bold")
    for name in ("steps", "loss", "accuracy", "images/s", "seconds", "loss scale", "skipped steps"):
        table.add_column(name, justify="right")
    for history in histories:
        table.add_row(
            history.precision,
            f"{len(history.loss)}",
            f"{history.final_loss:.3f}",
            "-" if history.accuracy is None else f"{history.accuracy:.2%}",
            f"{history.images_per_second:,.0f}",
            f"{history.seconds:.1f}",
            f"{history.loss_scale[-1]:g}",
            f"{sum(history.skipped)}",
        )
    make_console().print(table)


def save_plot(histories: list[History], title: str, path: Path) -> None:
    """Loss, loss scale and skipped steps over the steps, one line per run, as a PNG."""
    figure, (loss, scale, skips) = plt.subplots(
        3, 1, figsize=(8, 8), sharex=True, height_ratios=(3, 1.4, 1.4), layout="constrained"
    )
    for index, history in enumerate(histories):
        style = {"color": COLOURS.get(history.precision, f"C{index}"), "linestyle": DASHES[index % len(DASHES)]}
        steps = range(1, len(history.loss) + 1)
        loss.plot(steps, history.loss, color=style["color"], alpha=0.3, linewidth=0.7)
        loss.plot(steps, _running_mean(history.loss), label=_label(history), linewidth=1.6, **style)
        scale.plot(steps, history.loss_scale, label=history.precision, linewidth=1.6, drawstyle="steps-mid", **style)
        skips.plot(steps, _running_sum(history.skipped), linewidth=1.6, drawstyle="steps-post", **style)
    longest = max(len(history.loss) for history in histories)
    loss.set(title=title, ylabel="training loss", xlim=(1, max(2, longest)), ylim=(0, None))
    loss.legend(title=f"mean of {WINDOW} steps (single steps pale)", frameon=False)
    scale.set_yscale("log", base=2)
    scale.set(ylabel="loss scale")
    _pad_log_axis(scale, [value for history in histories for value in history.loss_scale])
    most = max(sum(history.skipped) for history in histories)
    skips.set(ylabel="skipped steps\n(so far)", xlabel="step", ylim=(-0.05 * max(1, most), 1.15 * max(1, most)))
    skips.xaxis.get_major_locator().set_params(integer=True)
    skips.yaxis.get_major_locator().set_params(integer=True, nbins=4)
    if most == 0:
        skips.text(0.5, 0.55, "no step was skipped", transform=skips.transAxes, ha="center", color="#777777")
    for axes in (loss, scale, skips):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _label(history: History) -> str:
    return (
        history.precision if history.accuracy is None else f"{history.precision}: test accuracy {history.accuracy:.1%}"
    )


def _running_mean(values: list[float]) -> list[float]:
    means = []
    for step in range(len(values)):
        window = values[max(0, step - WINDOW // 2) : step + WINDOW // 2 + 1]  # centred, so that it does not lag
        means.append(sum(window) / len(window))
    return means


def _running_sum(flags: list[bool]) -> list[int]:
    return [sum(flags[:end]) for end in range(1, len(flags) + 1)]


def _pad_log_axis(axes: Axes, values: list[float]) -> None:
    axes.set_ylim(min(values) / 2, max(values) * 2)
