"""Ranks that share sequences may share layers by stages of a pipeline too: one device's numbers, over all micro-batches."""

import pytest
import torch
from matrix import TOLERANCE
from sequences import OVERFLOWS, plugin_for
from test_sequence_parallel import MODES, run

from booster import Booster

SLOW = pytest.mark.slow
STAGES = {"pp_size": 2, "sp_size": 2}
CASES = {
    "gqa": {"length": 17},
    "deep": {"length": 16, "pp_style": "interleaved", "num_model_chunks": 2, "num_micro_batches": 4},
    "window": {"length": 13, "pp_style": "gpipe", "num_micro_batches": 4},
    "checkpointed_deep": {
        "length": 16,
        "kind": "zero",
        "pp_style": "zbv",
        "num_micro_batches": 4,
        "steps": 2,
    },
    "encoder": {"length": 17, "num_micro_batches": 4},
    "llama": {"length": 17},
    "mistral": {"length": 13, "num_micro_batches": 4},
}


@pytest.mark.parametrize("model", ["gqa", *(pytest.param(name, marks=SLOW) for name in CASES if name != "gqa")])
def test_stages_train_as_one_device(run_on_ranks, model):
    cases = [((model,), {**CASES[model], **STAGES, "sequence_parallelism_mode": mode}) for mode in MODES]
    run(run_on_ranks, 4, cases, 1e-5)


@pytest.mark.parametrize("precision", [pytest.param(name, marks=SLOW) for name in TOLERANCE if name != "fp32"])
def test_stages_round_as_one_device(run_on_ranks, precision):
    options = {**STAGES, "precision": precision, "overflows": OVERFLOWS}
    cases = [(("gqa",), {**options, "sequence_parallelism_mode": mode}) for mode in MODES]
    run(run_on_ranks, 4, cases, TOLERANCE[precision])


def test_micro_batches_of_one_stage_have_the_loss_over_all_tokens(run_on_ranks):
    options = {"length": 17, "sp_size": 2, "num_micro_batches": 2, "steps": 2}
    models = [("gqa", "ring_attn"), ("mistral", "all_to_all"), ("mistral", "ring_attn")]
    cases = [((model,), {**options, "sequence_parallelism_mode": mode}) for model, mode in models]
    run(run_on_ranks, 2, cases, 1e-5)


def cut_twice(rank, world_size):
    booster = Booster("cpu", plugin=plugin_for(world_size, "hybrid", sp_size=2, sequence_parallelism_mode="ring_attn"))
    batch = {"tokens": torch.ones(2, 16), "table": torch.ones(3, 3)}
    for _ in range(2):  # what stays whole may come again
        part = booster.shard_sequence(batch, whole=["table"])
    assert part["tokens"].shape == (2, 8)
    with pytest.raises(ValueError, match="was cut by shard_sequence before"):
        booster.shard_sequence({"tokens": part["tokens"]})
    empty = booster.shard_sequence((torch.ones(0, 16), torch.ones(0, 16)))
    assert [part.shape for part in empty] == [(0, 8), (0, 8)]


def test_a_batch_that_was_cut_is_not_cut_again(ranks2):
    ranks2(cut_twice)
