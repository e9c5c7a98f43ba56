"""The formulas of docs/scaling.md: known values and tables. test_scaling_bytes.py compares them with real jobs."""

import dataclasses
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.scaling import tables as scaling
from benchmarks.scaling.decoder import LLAMA_7B, LLAMA_70B, PRECISIONS, Model, axis_shape, hybrid, stage_parameters
from benchmarks.scaling.formulas import (
    activations,
    held_memory,
    layer_activations,
)
from benchmarks.scaling.moments import Load, step_moments
from benchmarks.scaling.plan import Plan, ddp, fsdp, zero
from benchmarks.scaling.traffic import (
    H100,
    bandwidth,
    bubble,
    compute_seconds,
    data_parallel_messages,
    pipeline_messages,
    sent_bytes,
    tensor_parallel_messages,
)

FP32, AUTOCAST = PRECISIONS["fp32"], PRECISIONS["autocast"]
MASTERS, SPLIT, NONE = (PRECISIONS[f"naive, {form}"] for form in ("fp32 masters", "split", "no masters"))
GPT = Model(hidden=64, layers=8, heads=4, ffn=256, vocabulary=96, sequence=32, gated=False, dropout=True)


# ---- sizes


def test_the_models_have_as_many_parameters_as_those_they_are_named_after():
    assert LLAMA_7B.parameters == 6_738_415_616
    assert LLAMA_70B.parameters == 68_976_648_192


@pytest.mark.parametrize("model", [LLAMA_7B, LLAMA_70B])
def test_stages_together_hold_the_model(model):
    for plan in (hybrid(8, pp=4), hybrid(8, pp=4, tp=2)):
        held = sum(stage_parameters(model, plan, stage) for stage in range(4))
        norms = (2 * model.layers + 1) * model.hidden  # whole on every rank of tensor parallelism
        assert plan.tp * held - (plan.tp - 1) * norms == model.parameters


def test_without_vocabulary_parallelism_the_tables_lie_whole_on_every_rank():
    plan = hybrid(2, tp=2)
    more = stage_parameters(LLAMA_7B, plan, vocabulary_parallel=False) - stage_parameters(LLAMA_7B, plan)
    assert more == LLAMA_7B.vocabulary * LLAMA_7B.hidden


# ---- memory


@pytest.mark.parametrize(("precision", "size"), [(FP32, 16), (AUTOCAST, 16), (MASTERS, 16), (SPLIT, 14), (NONE, 12)])
def test_one_rank_holds_the_bytes_a_parameter_that_memory_md_reports(precision, size):
    assert held_memory(1, Plan(), precision).held == size


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_more_sharding_never_takes_more_and_divides_exactly_what_it_names(precision):
    sizes = [held_memory(1, plan, precision).held for plan in (ddp(8), zero(8, 1), zero(8, 2), fsdp(8))]
    assert sizes == sorted(sizes, reverse=True)
    one, eight = held_memory(1, fsdp(1), precision).held, held_memory(1, fsdp(8), precision).held
    assert one == 8 * eight
    one, eight = held_memory(1, zero(1, 2), precision), held_memory(1, zero(8, 2), precision)
    assert one.weights == eight.weights
    assert one.states + one.masters + one.gradients == 8 * (eight.states + eight.masters + eight.gradients)


def moments(model, plan, precision, **load):
    return step_moments(model, plan, precision, Load(1, **load))


def test_of_whole_gradients_zero_2_has_three_buckets_and_no_more():
    whole = 2 * LLAMA_7B.parameters
    small, mid, large, one = (
        moments(LLAMA_7B, zero(8, 2), MASTERS, bucket_bytes=n * 2**20) for n in (25, 400, 500, 1e6)
    )
    assert large.ends - mid.ends == 3 * 100 * 2**20 * (1 - 1 / 8)  # while they are under way they are not yet divided
    assert small.ends == (2 + 4 / 8 + 8 / 8 + 2 / 8) * LLAMA_7B.parameters + 3 * (1 - 1 / 8) * (
        2 * 32000 * 4096  # the embedding, which no bucket divides
    )
    assert one.ends == (2 + 4 / 8 + 8 / 8) * LLAMA_7B.parameters + 2 * whole


def test_the_stages_of_a_pipeline_take_different_memory():
    load = Load(1, 8, checkpointed=True)
    first, middle, last = (step_moments(LLAMA_7B, hybrid(4, pp=4), MASTERS, load, stage) for stage in (0, 1, 3))
    received = 8 * 4096 * LLAMA_7B.hidden * 2  # by a stage in the middle from both sides
    table = LLAMA_7B.vocabulary * LLAMA_7B.hidden
    assert middle.ends - first.ends == received - (2 + 4 + 8 + 2) * table
    assert last.begins - first.begins > 12 * 4096 * 32000 - 4 * 4096 * LLAMA_7B.hidden * 2 * 8


def test_of_an_interleaved_pipeline_no_more_micro_batches_are_active_than_there_are():
    plan = hybrid(4, pp=4, chunks=2)
    one, two = (activations(LLAMA_7B, plan, MASTERS, 1, num, checkpointed=False) for num in (1, 2))
    assert two == 2 * one


@pytest.mark.parametrize("plan", [ddp(1), zero(1, 2), fsdp(1), hybrid(1), hybrid(32, pp=32), hybrid(64, pp=32)])
@pytest.mark.parametrize("num", [1, 4])
def test_one_rank_and_stages_of_one_layer_hold_at_least_what_is_held(plan, num):
    found = moments(LLAMA_7B, plan, SPLIT, num_micro_batches=num)
    assert found.peak >= held_memory(stage_parameters(LLAMA_7B, plan), plan, SPLIT).held


# ---- activations


def test_the_special_case_of_korthikanti_et_al():
    tokens, h, a, s = 96.0, GPT.hidden, GPT.heads, GPT.sequence
    for t in (1, 2, 4):
        expected = tokens * h * (10 + 24 / t + 5 * a * s / (h * t))
        assert layer_activations(GPT, SPLIT, tokens, tp=t, stored_scores=True) == pytest.approx(expected)
        with_sequence = layer_activations(
            GPT, SPLIT, tokens, tp=t, sequence_parallel=True, stored_scores=True, regather=True
        )
        assert with_sequence == pytest.approx(tokens * h * (34 + 5 * a * s / h) / t)
    assert layer_activations(GPT, SPLIT, tokens) == tokens * h * 34


def test_checkpointing_keeps_a_layers_input_and_computes_one_layer_at_a_time():
    plan, tokens = Plan(), 2 * GPT.sequence
    layer = layer_activations(GPT, SPLIT, tokens)
    logits = 12 * tokens * GPT.vocabulary
    whole, kept = (activations(GPT, plan, SPLIT, 2, 1, checkpointed=c) for c in (False, True))
    assert whole == GPT.layers * layer + logits
    assert kept == GPT.layers * 2 * tokens * GPT.hidden + layer + logits


def test_the_first_stage_holds_a_micro_batch_for_every_stage_but_no_more_than_there_are():
    one = activations(GPT, Plan(pp=2), SPLIT, 1, 1, checkpointed=False)
    assert activations(GPT, Plan(pp=2), SPLIT, 1, 8, checkpointed=False) == 2 * one
    interleaved = activations(GPT, Plan(pp=2, chunks=2), SPLIT, 1, 8, checkpointed=False)
    assert interleaved == 2 * one * (1 + 1 / 4)


# ---- messages


def test_a_ring_sends_the_known_share_and_all_reduce_is_reduce_scatter_and_all_gather():
    assert sent_bytes("all_reduce", 4, 100) == 150
    assert sent_bytes("all_gather", 4, 100) == 75
    assert sent_bytes("send", 4, 100) == 100
    for n in (2, 8, 1024):
        parts = sent_bytes("reduce_scatter", n, 100) + sent_bytes("all_gather", n, 100)
        assert sent_bytes("all_reduce", n, 100) == pytest.approx(parts)
        assert sent_bytes("all_reduce", n, 100) < 200
    assert sent_bytes("all_reduce", 1, 100) == 0


def sent(messages):
    return sum(message.sent for message in messages)


def data_parallel(plan, precision, micro_batches=1, **options):
    return data_parallel_messages(plan, precision, 1000, 0, micro_batches, **options)


def test_one_rank_sends_nothing():
    for plan in (ddp(1), zero(1, 2), fsdp(1), hybrid(1)):
        assert data_parallel(plan, FP32) == []
        assert tensor_parallel_messages(GPT, plan, FP32, 10) == []
        assert pipeline_messages(GPT, plan, FP32, 10) == []


def test_layers_that_share_an_input_sum_its_gradient_once():
    plan = hybrid(2, tp=2)
    [plain] = tensor_parallel_messages(GPT, plan, SPLIT, 10, vocabulary_parallel=False)
    [gated] = tensor_parallel_messages(dataclasses.replace(GPT, gated=True), plan, SPLIT, 10, vocabulary_parallel=False)
    assert plain.size == gated.size == 4 * GPT.layers * 10 * GPT.hidden * 2


def test_stages_share_what_tensor_parallelism_sends():
    whole = sent(tensor_parallel_messages(GPT, hybrid(2, tp=2), SPLIT, 10))
    stages = [sent(tensor_parallel_messages(GPT, hybrid(8, tp=2, pp=4), SPLIT, 10, stage=s)) for s in range(4)]
    assert sum(stages) == pytest.approx(whole)


def test_a_pipeline_sends_activations_one_way_and_gradients_the_other():
    unit = 10 * GPT.hidden * 2
    plan = hybrid(4, pp=4)
    assert [sent(pipeline_messages(GPT, plan, SPLIT, 10, s)) / unit for s in range(4)] == [1, 2, 2, 1]
    chunks = hybrid(2, pp=2, chunks=2)
    assert [sent(pipeline_messages(GPT, chunks, SPLIT, 10, s)) / unit for s in range(2)] == [3, 3]
    divided = hybrid(8, tp=2, pp=4, sequence_parallel=True)
    assert sent(pipeline_messages(GPT, divided, SPLIT, 10, 1)) == unit


def test_the_bubble_vanishes_with_micro_batches_and_chunks():
    assert bubble(4, 1) == 3 / 4
    assert bubble(4, 13) == 3 / 16
    assert bubble(4, 13, chunks=3) == 1 / 14
    assert bubble(1, 5) == 0
    assert bubble(8, 4096) < 0.002


# ---- time


def test_a_ring_over_nodes_uses_the_network_card_of_every_member_in_a_node():
    inside = bandwidth(8, 1, H100)
    assert bandwidth(4, 1, H100) == bandwidth(2, 4, H100) == inside == 0.8 * 450e9
    assert bandwidth(64, 1, H100) == 0.8 * 8 * 50e9
    assert bandwidth(8, 8, H100) == 0.8 * 50e9
    assert bandwidth(32, 2, H100) == 0.8 * 4 * 50e9


def test_groups_of_every_axis_lie_as_the_plugin_numbers_ranks():
    plan = hybrid(64, tp=2, pp=4, zero_stage=1)
    assert [axis_shape(plan, axis) for axis in ("tp", "dp", "replicate", "pp")] == [(2, 1), (8, 2), (1, 16), (4, 16)]
    assert axis_shape(fsdp(32, replicas=4), "replicate") == (4, 8)
    assert axis_shape(zero(8, 1), "dp") == axis_shape(ddp(8), "dp") == (8, 1)


def test_compute_follows_the_rule_of_six_and_eight():
    seconds = compute_seconds(LLAMA_7B, 1000, 1, 2, H100, checkpointed=False)
    assert seconds == 6 * LLAMA_7B.parameters * 1000 / (989e12 * 0.5)
    assert compute_seconds(LLAMA_7B, 1000, 4, 2, H100, checkpointed=True) == pytest.approx(seconds * 8 / 6 / 4)


# ---- tables


def test_the_share_of_sending_lies_between_all_hidden_and_nothing_hidden():
    low, high = scaling.shares({"data": 1.0, "tp": 1.0, "pp": 1.0}, 10.0, 0.0)
    assert (low, high) == (1 / 11, 3 / 13)
    low, _ = scaling.shares({"data": 12.0, "tp": 0.0, "pp": 0.0}, 10.0, 0.0)
    assert low == 2 / 12


def test_micro_batches_of_a_step_add_up_and_the_largest_that_fit_are_taken():
    step = scaling.largest_step(LLAMA_7B, fsdp(64), MASTERS)
    assert step.num_micro_batches * step.micro_batch * 64 == scaling.SEQUENCES
    assert step.fits
    larger = dataclasses.replace(step, micro_batch=2 * step.micro_batch)
    assert larger.num_micro_batches == 0 or not larger.fits


@pytest.mark.parametrize("title", scaling.TABLES)
def test_the_page_shows_the_table_that_the_script_prints(title):
    assert scaling.TABLES[title]() in (ROOT / "docs" / "scaling.md").read_text()
