"""Files of weights and a weight that is tied across pipeline stages: a file may hold it once, under the name of one stage."""

import copy

import pytest
import safetensors.torch
import torch
from refusals import fingerprint
from torch import nn

from booster import Booster
from booster.checkpoint import CheckpointError
from booster.plugin import HybridParallelPlugin


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(seed):
    torch.manual_seed(seed)
    return Tied()


def loaded(rank, world_size, path):
    """What this rank then holds and `save_model` writes; or the error, and whether the model is as it was."""
    booster = Booster(plugin=HybridParallelPlugin(1, 2), mixed_precision="fp32")
    model, *_ = booster.boost(made(1))
    before = fingerprint(model)
    try:
        booster.load_model(model, path)
    except CheckpointError as error:
        return str(error), fingerprint(model) == before
    booster.save_model(model, f"{path}.again")
    return copy.deepcopy(model.state_dict()), safetensors.torch.load_file(f"{path}.again")


@pytest.mark.parametrize("kept", ["embedding.weight", "head.weight"])
def test_a_file_that_holds_a_tied_weight_once_loads_into_both_stages(ranks2, tmp_path, kept):
    whole = made(0).state_dict()
    left_out = {"embedding.weight", "head.weight"} - {kept}
    path = tmp_path / "once.safetensors"
    safetensors.torch.save_file({name: value for name, value in whole.items() if name not in left_out}, path)
    (first, written), (last, _) = ranks2(loaded, str(path))
    assert first.keys() | last.keys() == whole.keys()
    for state in (first, last, written):
        for name, value in state.items():
            assert torch.equal(value, whole[name]), name


def test_a_file_in_which_the_names_of_a_tied_weight_differ_is_refused_on_both_stages(ranks2, tmp_path):
    state = made(0).state_dict()
    path = tmp_path / "twice.safetensors"
    safetensors.torch.save_file(state | {"head.weight": state["head.weight"] + 1}, path)
    for error, unchanged in ranks2(loaded, str(path)):
        assert "are one tensor in the model, and differ in the file" in error
        assert unchanged
