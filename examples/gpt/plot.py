"""Draw the loss curves of several runs of train.py over one another, and print how far apart they are.

python examples/gpt/plot.py runs/gpt/gpt-single-fp16.json runs/gpt/gpt-hybrid-tp2-pp2-fp16.json

The first run is the one that the others are compared with.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
from history import History

COLOURS = ("#444444", "#d9480f", "#1f77b4", "#2b8a3e", "#9c36b5")
DASHES = ("-", "--", ":", "-.")  # lines that lie on each other stay visible
SMALLEST = 1e-7  # the float32 next to 1 is this far away; the difference of equal losses is drawn there


def differences(history: History, reference: History) -> list[float]:
    """How far the losses are apart, for each step that both runs have."""
    return [abs(mine - theirs) for mine, theirs in zip(history.loss, reference.loss, strict=False)]


def save_plot(histories: list[History], path: Path) -> None:
    """Loss, and its difference from the first run, over the steps, as a PNG."""
    figure, (loss, difference) = plt.subplots(
        2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    for index, history in enumerate(histories):
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)], "linewidth": 1.5}
        loss.plot(range(1, len(history.loss) + 1), history.loss, label=_label(history), **style)
        if index:
            apart = [max(value, SMALLEST) for value in differences(history, histories[0])]
            difference.plot(range(1, len(apart) + 1), apart, **style)
    loss.set(ylabel="training loss", xlim=(1, max(2, *(len(history.loss) for history in histories))))
    loss.legend(frameon=False)
    difference.set(ylabel=f"difference from\n{histories[0].label}", xlabel="step", yscale="log")
    for axes in (loss, difference):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _label(history: History) -> str:
    if history.validation_loss is None:
        return history.label
    return f"{history.label}: validation loss {history.validation_loss:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="draw the loss curves of several runs over one another")
    parser.add_argument("runs", type=Path, nargs="+", metavar="FILE.json", help="histories that train.py wrote")
    parser.add_argument("--output", type=Path, default=Path("runs/gpt/curves.png"), help="default: runs/gpt/curves.png")
    args = parser.parse_args()
    histories = [History.load(path) for path in args.runs]
    save_plot(histories, args.output)
    for history in histories:
        line = f"{history.label}: {len(history.loss)} steps, loss {history.loss[-1]:.4f}"
        if history is not histories[0]:
            apart = differences(history, histories[0])
            line += f", at most {max(apart):.2g} from {histories[0].label} (mean {sum(apart) / len(apart):.2g})"
        print(line)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
