"""The tables of docs/scaling.md, and `--check`."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.scaling.decoder import (
    LLAMA_7B,
    LLAMA_70B,
    PRECISIONS,
    Model,
    Precision,
    axis_shape,
    hybrid,
    layer_parameters,
    stage_parameters,
)
from benchmarks.scaling.formulas import activations, held_memory, layer_activations
from benchmarks.scaling.moments import Load, step_moments
from benchmarks.scaling.plan import Plan, ddp, fsdp, zero
from benchmarks.scaling.traffic import (
    H100,
    Message,
    bubble,
    compute_seconds,
    data_parallel_messages,
    message_seconds,
    pipeline_messages,
    sent_bytes,
    tensor_parallel_messages,
)

GB = 1e9
SEQUENCES = 1024  # of one step, over all ranks: 4.2 million tokens
RESERVE = 8e9  # bytes of a GPU for its context, workspaces and fragmentation
WORLDS = (8, 64, 256, 1024)
BASIS = "naive, fp32 masters"


def plans(model: Model, n: int) -> dict[str, Plan]:
    """The plans that the tables compare on `n` GPUs."""
    found = {
        "DDP": ddp(n),
        "ZeRO-1": zero(n, 1),
        "ZeRO-1, reduce_scatter": zero(n, 1, reduce_scatter=True),
        "ZeRO-2": zero(n, 2),
        "FSDP": fsdp(n),
        "FSDP, kept": fsdp(n, reshard=False),
    }
    if n > H100.gpus_per_node:
        found["HSDP, 8 a copy"] = fsdp(n, replicas=n // 8)
    if model is LLAMA_7B:
        found["TP 2 x dp"] = hybrid(n, tp=2, zero_stage=1)
        found["PP 4 x dp"] = hybrid(n, pp=4, zero_stage=1)
    else:
        found["TP 8 SP x dp, stage 0"] = hybrid(n, tp=8, sequence_parallel=True)
        found["TP 8 SP x dp"] = hybrid(n, tp=8, zero_stage=1, sequence_parallel=True)
    if n > H100.gpus_per_node:
        found["TP 8 SP x PP 4 x dp"] = hybrid(n, tp=8, pp=4, zero_stage=1, sequence_parallel=True)
    return found


@dataclass(frozen=True)
class Step:
    """One optimizer step of SEQUENCES sequences, layers checkpointed, on the fullest rank."""

    model: Model
    plan: Plan
    precision: Precision
    micro_batch: int

    @property
    def num_micro_batches(self) -> int:
        return SEQUENCES // self.plan.dp // self.micro_batch

    @property
    def tokens(self) -> int:
        """Of one data-parallel rank."""
        return SEQUENCES // self.plan.dp * self.model.sequence

    @property
    def accumulates(self) -> bool:
        """Whether gradients are reduced once; elsewhere every micro-batch reduces, so that whole ones never pile up."""
        return self.plan.pp > 1 or self.plan.gradient_shards == 1

    @property
    def peak(self) -> float:
        load = Load(self.micro_batch, self.num_micro_batches, checkpointed=True, accumulates=self.accumulates)
        stages = range(self.plan.pp)
        return max(step_moments(self.model, self.plan, self.precision, load, stage).peak for stage in stages)

    def messages(self) -> list[Message]:
        """Of the middle of the pipeline, where there is one."""
        model, plan, precision = self.model, self.plan, self.precision
        stage = 1 if plan.pp > 2 else 0
        parameters = stage_parameters(model, plan, stage)
        outside = parameters - layer_parameters(model, plan)
        times = 1 if plan.pp > 1 else self.num_micro_batches
        return [
            *data_parallel_messages(plan, precision, parameters, outside, times, accumulate=self.accumulates),
            *tensor_parallel_messages(
                model, plan, precision, self.tokens, stage=stage, accumulated=times > 1, checkpointed=True
            ),
            *pipeline_messages(model, plan, precision, self.tokens, stage),
        ]

    @property
    def fits(self) -> bool:
        return self.peak <= H100.memory - RESERVE


def largest_step(model: Model, plan: Plan, precision: Precision) -> Step:
    """With the largest micro-batch, a power of two, that fits; in a pipeline 1, which keeps the bubble small."""
    step = Step(model, plan, precision, 1)
    while plan.pp == 1 and step.num_micro_batches > 1:
        larger = dataclasses.replace(step, micro_batch=2 * step.micro_batch)
        if not larger.fits:
            break
        step = larger
    return step


# ---- tables


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def bytes_a_parameter(n: int = 64) -> str:
    rows = []
    for name, plan in (("DDP", ddp(n)), ("ZeRO-1", zero(n, 1)), ("ZeRO-2", zero(n, 2)), ("FSDP", fsdp(n))):
        held = (held_memory(1, plan, precision).held for precision in PRECISIONS.values())
        rows.append([name, *(f"{size:.2f}" for size in held)])
    return table([f"{n} GPUs", *PRECISIONS], rows)


def activation_table() -> str:
    rows = []
    for name, model, tp in (("7B", LLAMA_7B, 1), ("7B", LLAMA_7B, 2), ("70B", LLAMA_70B, 1), ("70B", LLAMA_70B, 8)):
        for sequence_parallel in (False, True) if tp > 1 else (False,):
            precision, plan = PRECISIONS[BASIS], Plan(tp=tp, sequence_parallel=sequence_parallel)
            layer, scores = (
                layer_activations(
                    model, precision, model.sequence, tp=tp, sequence_parallel=sequence_parallel, stored_scores=stored
                )
                for stored in (False, True)
            )
            whole, checkpointed = (activations(model, plan, precision, 1, 1, checkpointed=c) for c in (False, True))
            divided = f"{name}, TP {tp}{', SP' if sequence_parallel else ''}" if tp > 1 else name
            rows.append([divided, *(f"{size / GB:.2f}" for size in (layer, scores, whole, checkpointed))])
    header = ["one sequence of 4096, half", "a layer", "a layer, scores stored", "all", "all, checkpointed"]
    return table(header, rows)


def memory_table(model: Model) -> str:
    rows = []
    for n in WORLDS:
        for name, plan in plans(model, n).items():
            cells = []
            for precision in PRECISIONS.values():
                step = Step(model, plan, precision, 1)
                total = f"{step.peak / GB:.0f}"
                cells.append(f"**{total}**" if step.fits else total)
            rows.append([str(n), name, *cells])
    return table(["GPUs", "GB on the fullest GPU", *PRECISIONS], rows)


def traffic_table(model: Model) -> str:
    rows = []
    for n in WORLDS:
        for name, plan in plans(model, n).items():
            step = largest_step(model, plan, PRECISIONS[BASIS])
            if not step.fits:
                continue
            sent, seconds = costs(step)
            compute = compute_seconds(model, SEQUENCES * model.sequence, n, 2, H100, checkpointed=True)
            waiting = bubble(plan.pp, step.num_micro_batches, plan.chunks)
            rows.append(
                [
                    str(n),
                    name,
                    f"{step.num_micro_batches} x {step.micro_batch}",
                    *(f"{sent[axis] / GB:.1f}" if sent[axis] else "" for axis in ("data", "tp", "pp")),
                    f"{compute:.1f}",
                    f"{sum(seconds.values()):.2f}",
                    f"{waiting:.0%}" if plan.pp > 1 else "",
                    "{:.0%} to {:.0%}".format(*shares(seconds, compute, waiting)),
                ]
            )
    header = ["GPUs", "plan", "micro-batches", "GB data", "GB TP", "GB PP", "compute s", "sending s", "bubble", "share"]
    return table(header, rows)


def costs(step: Step) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes sent and seconds, of data parallelism ("data"), "tp" and "pp"."""
    sent, seconds = ({"data": 0.0, "tp": 0.0, "pp": 0.0} for _ in range(2))
    for message in step.messages():
        axis = message.axis if message.axis in sent else "data"
        sent[axis] += message.sent
        seconds[axis] += message_seconds(message, step.plan, H100)
    return sent, seconds


def shares(seconds: dict[str, float], compute: float, waiting: float) -> tuple[float, float]:
    """Share of a step that is spent sending: if data parallelism and pipelines send while others compute, as far as that
    lasts, and if nothing overlaps. Tensor parallelism never overlaps: what it sends is waited for."""
    busy = compute / (1 - waiting)
    hidden = max(0.0, seconds["data"] + seconds["pp"] - compute) + seconds["tp"]
    shown = sum(seconds.values())
    return hidden / (busy + hidden), shown / (busy + shown)


def precision_table(model: Model, n: int = 64) -> str:
    rows = []
    for name, plan in plans(model, n).items():
        sent = (costs(Step(model, plan, precision, 1))[0] for precision in PRECISIONS.values())
        rows.append([name, *(f"{sum(parts.values()) / GB:.1f}" for parts in sent)])
    return table([f"GB sent, {n} GPUs, micro-batches of 1", *PRECISIONS], rows)


def long_table() -> str:
    """Memory of one long sequence on 64 GPUs under FSDP, shared by 1, 8 or all of them; layers checkpointed."""
    rows = []
    for name, model in (("7B", LLAMA_7B), ("70B", LLAMA_70B)):
        for tokens in (2**17, 2**20):
            for size in (1, 8, 64):
                part = dataclasses.replace(model, sequence=tokens // size)
                load = Load(1, 1, checkpointed=True, accumulates=False)
                moments = [step_moments(part, fsdp(64), precision, load).peak / GB for precision in PRECISIONS.values()]
                peaks = [f"**{peak:.0f}**" if peak * GB + RESERVE <= H100.memory else f"{peak:.0f}" for peak in moments]
                kept = activations(part, fsdp(64), PRECISIONS[BASIS], 1, 1, checkpointed=True) / GB
                rows.append([name, f"{tokens // 2**10}k", str(size), f"{kept:.1f}", *peaks])
    return table(["model", "tokens", "`sp_size`", "activations", *PRECISIONS], rows)


TABLES: dict[str, Callable[[], str]] = {
    "Bytes a parameter": bytes_a_parameter,
    "Activations, GB": activation_table,
    "7B: memory": lambda: memory_table(LLAMA_7B),
    "70B: memory": lambda: memory_table(LLAMA_70B),
    "7B: communication of a step": lambda: traffic_table(LLAMA_7B),
    "70B: communication of a step": lambda: traffic_table(LLAMA_70B),
    "Long sequences": long_table,
    "7B: sent, by precision": lambda: precision_table(LLAMA_7B),
    "70B: sent, by precision": lambda: precision_table(LLAMA_70B),
}


# ---- check


def check(rank: int, n: int, meeting: str) -> None:
    """Measure all cases on this rank, and print them from rank 0. Raises AssertionError where formula and count differ.

    That a row is printed says that every rank agreed with the formulas.
    """
    import warnings

    import torch.distributed as dist

    from benchmarks.scaling.bytes import check_case, expected_moments, on_cpu
    from benchmarks.scaling.job import cases

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=n)
    rows = []
    for case in cases(n):
        measured = check_case(case)
        sent = sum(
            sent_bytes(kind, axis_shape(case.plan, axis)[0], size) for (kind, axis), size in measured.messages.items()
        )
        said = expected_moments(case)
        peaks = [f"{peak:.0f}" for peak in (measured.peak, said.peak, on_cpu(case, said).peak)]
        rows.append([str(n), case.name, case.precision, str(measured.held), f"{sent:.0f}", *peaks])
    dist.barrier()
    if rank == 0:
        header = [
            "ranks",
            "plan",
            "precision",
            "held, bytes",
            "sent in a step, bytes",
            "peak",
            "formula",
            "on CPU",
        ]
        print(table(header, rows), flush=True)
    dist.destroy_process_group()


def sections() -> Iterator[str]:
    for title, make in TABLES.items():
        yield f"### {title}\n\n{make()}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="run small jobs and compare")
    if parser.parse_args().check:
        import torch.multiprocessing as mp

        for n in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(check, (n, f"{folder}/meeting"), nprocs=n)
        return
    print("\n".join(sections()))
