"""Moving batches of every make to a device."""

import collections
from dataclasses import dataclass

import torch

from booster.data import to_device

META = torch.device("meta")


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str


Pair = collections.namedtuple("Pair", "x y")


class Movable:
    def to(self, device):
        return ("moved", device)


def test_every_tensor_moves_and_every_container_keeps_its_type():
    t = torch.ones(2)
    batch = {
        "list": [t, 1],
        "pair": Pair(t, None),
        "frozen": Frozen(t, "a"),
        "ordered": collections.OrderedDict(a=t),
        "default": collections.defaultdict(list, a=t),
        "user": collections.UserDict(a=t),
        "other": "text",
        "movable": Movable(),
        "class": torch.Tensor,
    }
    moved = to_device(batch, META)
    assert moved["list"][0].device == moved["pair"].x.device == moved["frozen"].x.device == META
    assert moved["ordered"]["a"].device == moved["default"]["a"].device == moved["user"]["a"].device == META
    assert moved["list"][1] == 1
    assert moved["pair"].y is None
    assert moved["frozen"].name == "a"
    assert moved["default"]["missing"] == []
    assert moved["movable"] == ("moved", META)
    assert (moved["other"], moved["class"]) == ("text", torch.Tensor)
    assert {k: type(v) for k, v in moved.items() if k != "movable"} == {
        k: type(v) for k, v in batch.items() if k != "movable"
    }
    assert batch["frozen"].x is t
    assert batch["ordered"]["a"] is t


def test_a_tensor_that_is_there_is_not_copied():
    t = torch.ones(2)
    assert to_device([t], torch.device("cpu"))[0] is t


def test_tokenizer_output_and_model_output_move(transformers):
    from transformers import BatchEncoding
    from transformers.modeling_outputs import BaseModelOutput

    encoding = to_device(BatchEncoding({"ids": torch.ones(1)}), META)
    assert isinstance(encoding, BatchEncoding)
    assert encoding["ids"].device == META
    output = to_device(BaseModelOutput(last_hidden_state=torch.ones(1)), META)
    assert isinstance(output, BaseModelOutput)
    assert output.last_hidden_state.device == output["last_hidden_state"].device == META
