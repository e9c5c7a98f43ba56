"""What a loop uses besides, where ranks share sequences: documents, accumulation, checkpoints, dropout; and what is sent."""

import pytest
import torch
from packages import package
from sequences import BATCH, HEADS, MODELS, VOCABULARY, WINDOW, batch_of, loss_on, of_transformers, plugin_for, shared
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from booster import Booster

MODES = ["all_to_all", "ring_attn"]
LENGTH = 17


def boosted(world_size, make, *, kind="hybrid", optimizer=torch.optim.SGD, lr=0.05, precision="fp32", **options):
    torch.manual_seed(7)
    model = make()
    booster = Booster("cpu", precision, plugin_for(world_size, kind, **options))
    return booster, *booster.boost(model, optimizer(model.parameters(), lr=lr))[:2]


def whole_weights(model):
    return {
        name: (p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()).clone()
        for name, p in model.named_parameters()
    }


def check_close(found, expected, tolerance=1e-5):
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=tolerance, msg=lambda text, name=name: name + text)


# ---------------------------------------------------------------------- transformers' own loss, and documents


def packed():
    """Two sequences of 17 tokens, the first of documents of 5, 9 and 3, the second of 2 and 15."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((5, 9, 3), (2, 15))])
    tokens = torch.randint(VOCABULARY, positions.shape, generator=torch.Generator().manual_seed(5))
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions}


def padded():
    batch = packed()
    del batch["position_ids"]
    real = torch.ones_like(batch["input_ids"])
    real[0, 12:] = 0
    return batch | {"attention_mask": real, "labels": batch["labels"].masked_fill(real == 0, -100)}


def unpadded():
    return {name: batch for name, batch in packed().items() if name != "position_ids"}


BATCHES = {"packed": packed, "padded": padded, "unpadded": unpadded}
KINDS = {"Llama": {}, "Mistral": {"sliding_window": WINDOW}, "Qwen2": {"use_sliding_window": False}}


def of_kind(kind):
    return of_transformers(kind, num_key_value_heads=2, **KINDS[kind])


def losses_of_transformers(rank, world_size, mode):
    found = []
    for kind in KINDS:
        for make in BATCHES.values():
            plugin = {"sp_size": world_size, "sequence_parallelism_mode": mode}
            booster, model, optimizer = boosted(world_size, lambda kind=kind: of_kind(kind), **plugin)
            batch, documents = make(), None
            if make is packed:
                documents = (batch["position_ids"] == 0).cumsum(1)
            loss = model(**booster.shard_sequence(batch, shift_labels=True, documents=documents)).loss
            booster.backward(loss, optimizer)
            optimizer.step()
            found.append((booster.reduce(loss.detach()), whole_weights(model)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_models_of_transformers_have_the_loss_and_gradients_of_their_own(ranks2, mode):
    """By transformers alone: shifted labels, masks of padding, windows, and documents by position ids."""
    found = ranks2(losses_of_transformers, mode)[0]
    package("transformers")
    for kind in KINDS:
        for make in BATCHES.values():
            torch.manual_seed(7)
            model = of_kind(kind)
            loss = model(**make(), use_cache=False).loss
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.05).step()
            mean, weights = found.pop(0)
            torch.testing.assert_close(
                mean, loss.detach().double(), rtol=0, atol=1e-5, msg=lambda text, kind=kind: kind + text
            )
            check_close(weights, dict(model.named_parameters()))


def losses_in_documents(rank, world_size, mode, form):
    booster, model, optimizer = boosted(world_size, MODELS["gqa"], sp_size=2, sequence_parallelism_mode=mode)
    tokens, positions, labels = batch_of("gqa", 0, LENGTH)
    ids = (torch.arange(LENGTH) >= 6).long() + (torch.arange(LENGTH) >= 11).long()
    if form == "cu_seqlens":
        tokens, positions, labels, documents = tokens[:1], positions[:1], labels[:1], torch.tensor([0, 6, 11, LENGTH])
    else:
        documents = ids.expand(BATCH, -1)
    loss = loss_on(booster, model, (tokens, positions, labels), documents=documents)
    booster.backward(loss, optimizer)
    optimizer.step()
    return float(loss.detach()), whole_weights(model)


@pytest.mark.parametrize("form", ["ids", "cu_seqlens"])
@pytest.mark.parametrize("mode", MODES)
def test_attention_stays_within_documents(ranks2, mode, form):
    found = ranks2(losses_in_documents, mode, form)
    booster, model, optimizer = boosted(1, MODELS["gqa"])
    tokens, positions, labels = batch_of("gqa", 0, LENGTH)
    ids = (torch.arange(LENGTH) >= 6).long() + (torch.arange(LENGTH) >= 11).long()
    rows = BATCH if form == "ids" else 1
    mask = ((ids[:, None] == ids) & torch.ones(LENGTH, LENGTH).tril().bool()).expand(rows, 1, -1, -1)
    loss = loss_on(booster, model, (tokens[:rows], positions[:rows], mask, labels[:rows]))
    booster.backward(loss, optimizer)
    optimizer.step()
    for own, weights in found:
        assert own == pytest.approx(float(loss.detach()), abs=1e-5)
        check_close(weights, whole_weights(model))


# ---------------------------------------------------------------------- the loop around


def accumulated(rank, world_size, by_tokens, mode, kind):
    plugin = {} if world_size == 1 else {"sp_size": 2, "sequence_parallelism_mode": mode, "kind": kind}
    booster, model, optimizer = boosted(world_size, MODELS["gqa"], **plugin)
    for step in range(2):
        parts = [shared(batch_of("gqa", 10 * step + part, LENGTH - part), booster.plugin) for part in range(2)]
        cut = [booster.shard_sequence(part) for part in parts]
        own = float(sum((labels != -100).sum() for *_, labels in cut))
        number = float(booster.reduce(torch.tensor(own), "sum")) if by_tokens else None
        with booster.accumulate(model, optimizer, num_micro_batches=2, num_tokens=number):
            for part in parts:
                if by_tokens:
                    tokens, positions, labels = booster.shard_sequence(part)
                    loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum")
                else:
                    loss = loss_on(booster, model, part)
                booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        with booster.no_sync(model, optimizer):
            booster.backward(loss_on(booster, model, parts[0]), optimizer)
        booster.backward(loss_on(booster, model, parts[1]), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return whole_weights(model)


@pytest.mark.parametrize(("by_tokens", "mode", "kind"), [(True, "ring_attn", "fsdp"), (False, "all_to_all", "hybrid")])
def test_accumulated_passes_and_passes_in_no_sync_equal_one_device(ranks2, by_tokens, mode, kind):
    expected = accumulated(0, 1, by_tokens, mode, kind)
    for weights in ranks2(accumulated, by_tokens, mode, kind):
        check_close(weights, expected)


def recomputed(rank, world_size, cut_before_backward):
    """Weights after passes of a checkpointed model: its second batch was cut, or went forward, before the first goes back."""
    plugin = {} if world_size == 1 else {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
    booster, model, optimizer = boosted(world_size, MODELS["checkpointed"], **plugin)
    batches = [batch_of("checkpointed", 0, LENGTH), batch_of("checkpointed", 1, LENGTH + 6 * cut_before_backward)]
    first = loss_on(booster, model, batches[0])
    second = booster.shard_sequence(batches[1]) if cut_before_backward else loss_on(booster, model, batches[1])
    if cut_before_backward:
        booster.backward(first, optimizer)
        del second
    else:
        booster.backward(first + second, optimizer)
    optimizer.step()
    return whole_weights(model)


@pytest.mark.parametrize("cut_before_backward", [True, False])
def test_activations_are_recomputed_as_their_own_batch_was_cut(ranks2, cut_before_backward):
    expected = recomputed(0, 1, cut_before_backward)
    for weights in ranks2(recomputed, cut_before_backward):
        check_close(weights, expected)


def mean_of_its_own(rank, world_size):
    booster, model, optimizer = boosted(world_size, MODELS["gpt"], sp_size=2, sequence_parallelism_mode="all_to_all")
    tokens, positions, labels = booster.shard_sequence(batch_of("gpt", 0, LENGTH))
    loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())
    with pytest.raises(RuntimeError, match=r"b\.token_mean"):
        booster.backward(loss, optimizer)
    loss_on(booster, model, batch_of("gpt", 0, LENGTH))
    booster.shard_sequence(batch_of("gpt", 1, LENGTH))  # the next one, early


def test_a_mean_over_a_ranks_own_tokens_is_no_loss(ranks2):
    ranks2(mean_of_its_own)


def recomputed_of_either(rank, world_size):
    booster, model, optimizer = boosted(
        world_size, MODELS["checkpointed"], sp_size=2, sequence_parallelism_mode="ring_attn"
    )
    loss = sum(loss_on(booster, model, batch_of("gqa", step, LENGTH + 6 * step)) for step in range(2))
    with pytest.raises(RuntimeError, match="recomputed, which differ in length"):
        booster.backward(loss, optimizer)


def test_activations_of_batches_that_were_cut_otherwise_are_not_recomputed_together(ranks2):
    ranks2(recomputed_of_either)


def resumed(rank, world_size, folder, saved_by, plugins):
    """Weights after steps 2 and 3: straight through, and loaded by every one of `plugins`."""

    def step(job, number):
        booster, model, optimizer = job
        loss = loss_on(booster, model, shared(batch_of("gqa", number, LENGTH), booster.plugin))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    make = {"optimizer": torch.optim.AdamW, "lr": 3e-3, "precision": "bf16_naive"}
    job = boosted(world_size, MODELS["gqa"], **make, **saved_by)
    step(job, 0)
    step(job, 1)
    job[0].save(folder, model=job[1], optimizer=job[2])
    step(job, 2)
    found = [whole_weights(job[1])]
    for plugin in plugins:
        other = boosted(world_size, MODELS["gqa"], **make, **plugin)
        other[0].load(folder, model=other[1], optimizer=other[2])
        step(other, 2)
        found.append(whole_weights(other[1]))
    return found


@pytest.mark.slow
def test_a_checkpoint_goes_on_to_the_bit_and_loads_where_sequences_are_shared_otherwise(ranks4, tmp_path):
    cut = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
    plugins = [{"kind": "fsdp", **cut}, {"kind": "fsdp"}, {"sp_size": 4, "sequence_parallelism_mode": "all_to_all"}]
    for through, again, *others in ranks4(resumed, str(tmp_path / "run"), plugins[0], plugins):
        for name, weight in through.items():
            assert torch.equal(weight, again[name]), name
        for other in others:  # half products in another order
            check_close(other, through, 5e-3)


def tensor_parallel(rank, world_size, mode, options):
    make = {"sp_size": 2, "sequence_parallelism_mode": mode, "tp_size": 2, **options} if world_size > 1 else {}
    booster, model, optimizer = boosted(world_size, lambda: of_kind("Llama"), **make)
    losses = []
    for step in range(2):
        loss = model(
            **booster.shard_sequence(shared(batch_of("llama", step, LENGTH), booster.plugin), shift_labels=True)
        ).loss
        booster.backward(loss, optimizer)
        norm = optimizer.clip_grad_by_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((float(booster.reduce(loss.detach())), float(norm)))
    return losses, whole_weights(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options"),
    [("all_to_all", {}), pytest.param("ring_attn", {"kind": "zero"}, marks=pytest.mark.slow)],
)
def test_ranks_that_share_layers_may_share_sequences_too(ranks4, mode, options):
    package("transformers")
    losses, weights = tensor_parallel(0, 1, mode, {})
    for own, held in ranks4(tensor_parallel, mode, options):
        torch.testing.assert_close(own, losses, rtol=0, atol=1e-5)
        check_close(held, weights)


class Drops(nn.Module):
    """Attention, so that it has some, and which numbers were dropped."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        heads = self.layer(x).unflatten(-1, (4, 2)).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return F.dropout(torch.ones_like(out), 0.5) + 0 * out


def dropped(rank, world_size, kind):
    booster, model, _ = boosted(world_size, Drops, kind=kind, sp_size=2, sequence_parallelism_mode="all_to_all")
    torch.manual_seed(3)  # as scripts do, on all ranks alike
    return model(booster.shard_sequence(torch.ones(2, 16, 8))).detach()


@pytest.mark.parametrize("kind", ["hybrid", "fsdp"])
def test_dropout_draws_otherwise_for_other_tokens(ranks2, kind):
    first, second = ranks2(dropped, kind)
    assert not torch.equal(first, second)


# ---------------------------------------------------------------------- what is sent, and what is kept


def kept_and_sent(rank, world_size, model, mode):
    """Bytes that autograd keeps of activations, each storage once, and that attention sends in a forward pass."""
    booster, model, _ = boosted(world_size, MODELS[model], sp_size=world_size, sequence_parallelism_mode=mode)
    batch = booster.shard_sequence(batch_of("gqa", 0, 64))
    kept, held, sent = {}, [], []

    def pack(tensor):
        weight = tensor if tensor._base is None else tensor._base
        if not (weight.is_leaf and weight.requires_grad):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            held.append(tensor)  # so that no other gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), Sent(sent):
        model(*batch[:2])
    return sum(kept.values()), sum(sent)


class Sent(TorchDispatchMode):
    """Bytes that collectives and point-to-point calls send, by the tensors that they are given."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("c10d::alltoall_base"):
            self.found.append(args[1].nbytes)
        elif name.startswith("c10d::send"):
            self.found.append(sum(x.nbytes for x in args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_keeps_its_share_of_activations_and_sends_its_share_of_attention(run_on_ranks, mode):
    # Activations are those of the tokens: half as many ranks keep twice as much, but for the few numbers of a cut.
    two, four = (run_on_ranks(kept_and_sent, size, "gpt", mode) for size in (2, 4))
    assert two[0][0] == pytest.approx(2 * four[0][0], rel=0.03)
    two, four = (run_on_ranks(kept_and_sent, size, "gqa", mode) for size in (2, 4))
    element, features = 4, 32
    tokens = BATCH * 64
    for size, found in ((2, two), (4, four)):
        if mode == "all_to_all":
            # Queries and outputs of 4 heads; keys and values of 2, of 4 where there are 4 ranks.
            expected = 2 * (tokens // size) * element * (2 * features + 2 * features * max(2, size) // HEADS)
        else:
            expected = 2 * (size - 1) * (tokens // size) * element * 2 * features * 2 // HEADS
        assert {sent for _, sent in found} == {expected}


def ring_beside_one_process(rank, world_size):
    from benchmarks.ring_attention import rounds

    return rounds(8192, 3)


@pytest.mark.slow
def test_a_ring_takes_little_more_cpu_time_than_one_process(ranks2):
    """Of attention on 8,192 tokens, both passes, summed over ranks; one process next to itself says how sure that is."""
    ratios, again = zip(*ranks2(ring_beside_one_process)[0], strict=True)
    assert min(ratios) <= 1.15 * max(1.0, *again)
