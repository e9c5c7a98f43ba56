"""Who computes what when, in a pipeline of four stages: all forwards first, one forward one backward, and interleaved.

python benchmarks/figures/pipeline.py
"""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from style import Theme, draw

STAGES, MICRO_BATCHES = 4, 8
BACKWARD = 2  # a backward takes twice a forward

Span = tuple[int, float, float, str, int]  # rank, begin, length, "F" or "B", micro-batch


def gpipe(rank: int) -> list[tuple[str, int, int]]:
    """What a rank does, in order: (kind, micro-batch, stage). All forwards, then all backwards."""
    return [("F", m, rank) for m in range(MICRO_BATCHES)] + [("B", m, rank) for m in range(MICRO_BATCHES)]


def one_f_one_b(rank: int) -> list[tuple[str, int, int]]:
    """As many forwards as stages follow, then one of each in turn, then the backwards that are left."""
    ahead = min(MICRO_BATCHES, STAGES - 1 - rank)
    order = [("F", m, rank) for m in range(ahead)]
    for m in range(MICRO_BATCHES - ahead):
        order += [("F", m + ahead, rank), ("B", m, rank)]
    return order + [("B", m, rank) for m in range(MICRO_BATCHES - ahead, MICRO_BATCHES)]


def interleaved(rank: int, chunks: int = 2) -> list[tuple[str, int, int]]:
    """Two stages on every rank, each half as deep: micro-batches go round twice, in groups of as many as there are ranks."""
    total = MICRO_BATCHES * chunks

    def at(k: int, backward: bool) -> tuple[str, int, int]:
        group, within = divmod(k, STAGES * chunks)
        chunk, m = divmod(within, STAGES)
        chunk = chunks - 1 - chunk if backward else chunk
        return ("B" if backward else "F", group * STAGES + m, chunk * STAGES + rank)

    ahead = min(total, (STAGES - rank - 1) * 2 + (chunks - 1) * STAGES)
    order = [at(k, False) for k in range(ahead)]
    for k in range(total - ahead):
        order += [at(k + ahead, False), at(k, True)]
    return order + [at(k, True) for k in range(total - ahead, total)]


def simulate(orders: list[list[tuple[str, int, int]]], stages: int, unit: float) -> list[Span]:
    """When each part begins: after its rank is free, and after the part of the neighbouring stage that it waits for."""
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(orders)
    place = [0] * len(orders)
    spans: list[Span] = []
    while any(place[rank] < len(order) for rank, order in enumerate(orders)):
        moved = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                kind, m, stage = order[place[rank]]
                before = _before(kind, m, stage, stages)
                if before is not None and before not in done:
                    break
                begin = max(free[rank], done.get(before, 0.0) if before else 0.0)
                length = unit * (BACKWARD if kind == "B" else 1)
                done[kind, m, stage] = free[rank] = begin + length
                spans.append((rank, begin, length, kind, m))
                place[rank] += 1
                moved = True
        if not moved:
            raise ValueError("these orders wait for each other")
    return spans


def _before(kind: str, m: int, stage: int, stages: int) -> tuple[str, int, int] | None:
    if kind == "F":
        return ("F", m, stage - 1) if stage else None
    return ("B", m, stage + 1) if stage < stages - 1 else ("F", m, stage)


def schedules(theme: Theme) -> Figure:
    """Three schedules below each other, on one scale of time."""
    rows = (
        ("gpipe", simulate([gpipe(r) for r in range(STAGES)], STAGES, 1.0)),
        ("1f1b", simulate([one_f_one_b(r) for r in range(STAGES)], STAGES, 1.0)),
        ("interleaved", simulate([interleaved(r) for r in range(STAGES)], 2 * STAGES, 0.5)),
    )
    figure, panels = plt.subplots(3, 1, figsize=(9, 5.2), sharex=True, layout="constrained")
    for axes, (name, spans) in zip(panels, rows, strict=True):
        end = max(begin + length for _, begin, length, _, _ in spans)
        busy = sum(length for _, _, length, _, _ in spans)
        for rank, begin, length, kind, m in spans:
            colour = theme.blue if kind == "F" else theme.orange
            axes.add_patch(
                Rectangle((begin, rank - 0.42), length, 0.84, facecolor=colour, edgecolor=theme.paper, linewidth=0.9)
            )
            if length >= 1:
                axes.text(begin + length / 2, rank, str(m), ha="center", va="center", color=theme.on, fontsize=8)
        axes.set_title(f"{name}: idle {1 - busy / (STAGES * end):.0%} of the time", loc="left", fontsize=10)
        axes.set(ylim=(STAGES - 0.5, -0.5), xlim=(0, 33.5))
        axes.set_yticks(range(STAGES), [f"rank {rank}" for rank in range(STAGES)])
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in (theme.blue, theme.orange)]
    figure.legend(handles, ["forward", "backward"], loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    draw("pipeline", schedules)
