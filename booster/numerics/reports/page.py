"""A record as one HTML page with pictures: one file, which loads nothing and runs no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from html import escape

from booster.common.arguments import raised
from booster.numerics.record.recorded_run import Run, Step
from booster.numerics.record.samples import Underflow, edges
from booster.numerics.reports.pictures import STYLE, Band, bars, lines, map_of
from booster.numerics.reports.summary import MOST_CULPRITS, STILL, WORTH_SAYING, OptimizerSummary, by_tensor, summarise

_WIDE, _NARROW = 720, 340  # pixels; of each picture there are two, because text in one that shrinks cannot be read
_MOST_ROWS = 40
_MOST_COLUMNS = 60

_STYLE = f"""{STYLE}
body {{ background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 16px;
  max-width: 720px; }}
h1 {{ font-size: 22px; margin: 8px 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 17px; margin: 32px 0 0; border-top: 1px solid var(--grid); padding-top: 16px; }}
h3 {{ font-size: 15px; margin: 24px 0 2px; }}
p {{ margin: 2px 0 8px; color: var(--soft); }}
.note {{ color: var(--bad); }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 8px 16px; margin: 12px 0; }}
dt {{ color: var(--soft); font-size: 13px; }}
dd {{ margin: 0; font-size: 19px; font-variant-numeric: tabular-nums; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }}
td, th {{ text-align: right; padding: 2px 14px 2px 0; font-weight: normal; }}
th {{ color: var(--soft); }}
svg {{ display: block; max-width: 100%; height: auto; }}
.narrow {{ display: none; }}
@media (max-width: 700px) {{ .wide {{ display: none; }} .narrow {{ display: block; }} }}
"""


def page(run: Run) -> str:
    """The page of `run`, as HTML. A panel that would say nothing is left out."""
    summary = summarise(run)
    began = datetime.fromtimestamp(run.about.get("time", 0), timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    name = run.folder.resolve().name
    body = [f"<h1>{escape(name)}</h1>", f"<p>{escape(summary.heading)}; began {began}</p>"]
    body += [f'<p class="note">{escape(note)}</p>' for note in summary.notes]
    body += [
        f"<p>After step {switch['step']}: {escape(switch['precision'])}, by {escape(switch['why'])}</p>"
        for switch in summary.switches
    ]
    body += [f"<p>{escape(sentence)}</p>" for sentence in summary.autopilot_sentences()]
    for each in summary.optimizers:
        if len(summary.optimizers) > 1:
            body.append(f"<h2>Optimizer {escape(each.name)}</h2>")
        body += _of_optimizer(each, run.steps[each.name], run.samples.get(each.name, []))
    if not summary.optimizers:
        body.append("<p>No optimizer step was recorded.</p>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{_STYLE}</style></head>\n<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _of_optimizer(summary: OptimizerSummary, steps: Sequence[Step], samples: Sequence[Underflow]) -> Iterator[str]:
    yield _tiles(summary)
    yield from (f"<p>{escape(sentence)}</p>" for sentence in summary.skips())
    numbers = [step.number for step in steps]
    skipped = [step.number for step in steps if not step.applied]
    if summary.loss is not None:
        # What made a step overflow would make all other losses look alike.
        losses = [step.loss if step.applied else None for step in steps]
        shown = [loss for loss in losses if loss is not None and math.isfinite(loss)] or [1.0]
        base = 10 if min(shown) > 0 and max(shown) > 30 * min(shown) else None
        yield _panel(
            "Loss",
            "Mean over the passes of a step and over ranks."
            + (" Crosses: skipped steps, without their losses." if skipped else ""),
            lambda width: lines(numbers, losses, width=width, logarithm=base, marks=skipped),
        )
    if summary.is_scaled:
        scales = [step.loss_scale for step in steps]
        yield _panel(
            "Loss scale",
            "Crosses: skipped steps." if skipped else "No step was skipped.",
            lambda width: lines(numbers, scales, width=width, height=160, logarithm=2, marks=skipped, corners=True),
        )
    if summary.grad_norm is not None:
        norms = [step.grad_norm for step in steps]
        clips = [step.clip is not None for step in steps] if summary.clipped else None
        share = f" Below: share of steps that were clipped, {summary.clipped:.1%} of all." if summary.clipped else ""
        yield _panel(
            "Gradient norm",
            f"Of all gradients of the optimizer, before clipping.{share}",
            lambda width: lines(numbers, norms, width=width, logarithm=10, clipped=clips, marks=skipped),
        )
    if summary.skips_by_culprit and not summary.none_stands_out:
        culprits = [(name, float(count)) for name, count in summary.skips_by_culprit.items()][:MOST_CULPRITS]
        more = len(summary.skips_by_culprit) - len(culprits)
        yield _panel(
            "Skips by culprit",
            "How often the gradient of a parameter held an inf or NaN."
            + (f" {more} more are left out." if more else ""),
            lambda width: bars(culprits, width=width),
        )
    if summary.groups:
        yield _groups(summary)
    tensors = by_tensor(samples)
    yield from _over_time(
        "Underflow",
        "Share of each gradient that was lost to zero or lost bits as a subnormal number.",
        tensors,
        lambda row: row.lost + row.subnormal,
    )
    yield from _over_time(
        "Weights that stand still",
        "Share of weights that a step did not change, although their gradient was not zero: updates below half an ulp.",
        tensors,
        lambda row: row.still,
        least=STILL,
    )
    for format, left_out, picture in exponent_maps([own[-1] for own in tensors.values()]):
        text = f"In the last sample, times the loss scale, in {format}. The strongest colour is the most frequent of a row."
        yield _panel("Exponents", text + (f" {left_out} more are left out." if left_out else ""), picture)


def _tiles(summary: OptimizerSummary) -> str:
    room, scaled = summary.least_headroom, summary.is_scaled
    last_loss = "none finite" if summary.nonfinite_losses else ""
    if summary.loss is not None:
        last_loss = f"{summary.loss[1]:.4g}"
    tiles = [
        ("steps", f"{summary.first_step} – {summary.last_step}"),
        ("skipped", f"{summary.num_skipped}" if scaled or summary.num_skipped else ""),
        ("last loss", last_loss),
        ("a step", summary.pace),
        ("least headroom", "" if room is None else "none" if summary.num_nonfinite else f"{max(room, 0.0):.1f} bits"),
        ("best constant scale", f"{summary.best_scale:g}" if summary.best_scale is not None and scaled else ""),
    ]
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles if value) + "</dl>"


def _groups(summary: OptimizerSummary) -> str:
    rows = ["".join(["<tr>", *(f"<td>{cell}</td>" for cell in row), "</tr>"]) for row in summary.rows_of_groups()]
    head = "".join(f"<th>{name}</th>" for name in ("group", "gradient", "weight", "update", "update / weight"))
    return f"<h3>Norms by parameter group</h3><p>In the last sample.</p><table><tr>{head}</tr>{''.join(rows)}</table>"


def _over_time(
    title: str,
    text: str,
    tensors: dict[tuple[str, str], list[Underflow]],
    share: Callable[[Underflow], float | None],
    least: float = WORTH_SAYING,
) -> Iterator[str]:
    """A map of a share over steps, of the tensors where it is worth saying, in the order of the model."""
    worst = {key: max((share(row) or 0.0 for row in own), default=0.0) for key, own in tensors.items()}
    telling = sorted((key for key in worst if worst[key] >= least), key=lambda key: -worst[key])[:_MOST_ROWS]
    if not telling:
        return
    steps = sorted({row.step for own in tensors.values() for row in own})
    every = math.ceil(len(steps) / _MOST_COLUMNS)
    columns = steps[::every]
    kept = [key for key in tensors if key in telling]
    by_step = [{row.step: share(row) for row in tensors[key]} for key in kept]
    shares = [[own.get(step) for step in columns] for own in by_step]
    left_out = sum(value >= least for value in worst.values()) - len(kept)
    more = f" {left_out} with less are left out." if left_out else ""
    names, most = [tensors[key][0].label for key in kept], max(worst.values())
    yield _panel(
        title,
        f"{text} The strongest colour is {most:.2%}.{more}",
        lambda width: map_of(names, [f"{step}" for step in columns], shares, width=width, axis="step", most=most),
    )


def exponent_maps(rows: Sequence[Underflow]) -> Iterator[tuple[str, int, Callable[[int], str]]]:
    """Of each format of `rows` its name, how many rows are left out, and a map of counts by exponent, of a width."""
    for format in dict.fromkeys(row.format for row in rows):
        own = [row for row in rows if row.format == format and row.exponents.counts]
        left_out, own = max(0, len(own) - _MOST_ROWS), own[:_MOST_ROWS]
        if own:
            # That of float16 shows where its range ends.
            yield format, left_out, _map_of_exponents(own, format)


def _map_of_exponents(rows: Sequence[Underflow], format: str) -> Callable[[int], str]:
    least, small, largest = edges(format)
    low = min(row.exponents.low for row in rows)
    high = max(row.exponents.highest or 0 for row in rows) + 1
    bands = []
    if format == "float16":
        low, high = min(low, least - 1), max(high, largest + 2)
        starts = [("lost", low), ("subnormal", least), ("normal", small), ("inf", largest + 1)]
        stops = [start for _, start in starts[1:]] + [high]
        bands = [Band(start - low, stop - low, name) for (name, start), stop in zip(starts, stops, strict=True)]
    shares = []
    for row in rows:
        most = max(row.exponents.counts)
        counts = [0.0] * (row.exponents.low - low) + list(row.exponents.counts)
        shares.append([count / most for count in counts + [0.0] * (high - low - len(counts))])
    return lambda width: map_of(
        [row.label for row in rows],
        [f"2{raised(exponent)}" for exponent in range(low, high)],
        shares,
        width=width,
        bands=bands,
        axis="magnitude",
    )


def _panel(title: str, text: str, picture: Callable[[int], str]) -> str:
    return (
        f'<h3>{escape(title)}</h3><p>{escape(text)}</p><div class="wide">{picture(_WIDE)}</div>'
        f'<div class="narrow">{picture(_NARROW)}</div>'
    )
