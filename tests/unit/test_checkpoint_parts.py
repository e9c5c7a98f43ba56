"""A part of a checkpoint is one class: what a new one says is saved, compared, loaded, and taken back where a load fails."""

import logging

import pytest
import torch
from torch import nn

from booster import Booster
from booster.checkpoint import CheckpointError, parts
from booster.checkpoint.parts.part import Part


class Modes(Part):
    """Whether each model trains, and the mean of its weights, as an example of a part with a tensor."""

    turn, legal = 1, bool

    def collect(self, into):
        return {
            "modes": {
                name: into.per_rank(
                    {"trains": model.training, "mean": torch.stack([p.mean() for p in model.parameters()]).mean()},
                    f"modes/{name}/{into.rank}",
                )
                for name, model in self.objects.models.items()
            }
        }

    def compare(self, found):
        said = found.saved.tree.get("modes", {})
        found.saved.request_all(said)
        for name in self.objects.models:
            if name not in said:
                found.saved.notes.append(f"models {name!r}: whether it trained is not known")
            elif not isinstance(said[name]["trains"], self.legal):
                yield f"models {name!r}: its mode is {said[name]['trains']!r}"

    def prepare(self, found):
        self.said = found.saved.value(found.saved.tree.get("modes", {}))

    def steps(self):
        yield "the modes of models", self.hand_over

    def hand_over(self, undo):
        for name, model in self.objects.models.items():
            undo.callback(model.train, model.training)
            model.train(self.said.get(name, {"trains": model.training})["trains"])

    def finish(self):
        for name, model in self.objects.models.items():
            model.unwrap().mean = self.said[name]["mean"] if name in self.said else None


@pytest.fixture
def with_modes(monkeypatch):
    monkeypatch.setattr(parts, "PARTS", (*parts.PARTS, Modes))


def job(booster):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return booster.boost(model, torch.optim.AdamW(model.parameters()))[:2]


def test_a_part_that_is_added_is_saved_and_loaded_with_its_tensors(with_modes, tmp_path):
    booster = Booster("cpu")
    model, optimizer = job(booster)
    model.eval()
    booster.save(tmp_path, model, optimizer)
    mean = torch.stack([p.mean() for p in model.parameters()]).mean()
    other, its_optimizer = job(booster)
    assert other.training
    booster.load(tmp_path, other, its_optimizer)
    assert not other.training
    assert torch.equal(other.unwrap().mean, mean)


def test_a_checkpoint_without_it_loads_with_a_note(tmp_path, monkeypatch, caplog):
    booster = Booster("cpu")
    model, optimizer = job(booster)
    booster.save(tmp_path, model, optimizer)
    monkeypatch.setattr(parts, "PARTS", (*parts.PARTS, Modes))
    model.eval()
    with caplog.at_level(logging.WARNING):
        booster.load(tmp_path, model, optimizer)
    assert not model.training
    assert "models '0': whether it trained is not known" in caplog.text


def test_what_it_finds_different_is_listed_with_all_else_and_nothing_changes(with_modes, tmp_path, monkeypatch):
    booster = Booster("cpu")
    model, optimizer = job(booster)
    model.training = "perhaps"
    with monkeypatch.context() as patched:
        patched.setattr(Modes, "legal", (bool, str))
        booster.save(tmp_path, model, optimizer)
    torch.manual_seed(1)
    wider = nn.Linear(8, 8)
    other = booster.boost(wider)[0]
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        booster.load(tmp_path, other)
    assert "models '0': its mode is 'perhaps'" in str(raised.value)
    assert "weight has shape (4, 4) in the checkpoint" in str(raised.value)
    assert other.training
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_what_no_load_would_take_fails_when_it_is_saved_and_older_checkpoints_stay(with_modes, tmp_path):
    booster = Booster("cpu")
    model, optimizer = job(booster)
    older = booster.save(tmp_path, model, optimizer, step=1)
    model.training = "perhaps"
    with pytest.raises(CheckpointError, match="what was written would not load") as raised:
        booster.save(tmp_path, model, optimizer, step=2, keep_last=1)
    assert "models '0': its mode is 'perhaps'" in str(raised.value)
    assert list(tmp_path.iterdir()) == [older]


def test_where_an_object_refuses_its_state_later_the_part_is_taken_back(with_modes, tmp_path):
    class Refuses:
        def __init__(self, step):
            self.step = step

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state):
            if state["step"] != self.step:
                raise KeyError("not today")

    booster = Booster("cpu")
    model, optimizer = job(booster)
    model.eval()
    booster.save(tmp_path, model, optimizer, extra=Refuses(3))
    model.train()
    with pytest.raises(CheckpointError, match="nothing was loaded: 'not today'"):
        booster.load(tmp_path, model, optimizer, extra=Refuses(4))
    assert model.training
    assert not hasattr(model.unwrap(), "mean")


@pytest.mark.parametrize("kind", [*parts.PARTS, Modes])
def test_each_part_says_what_it_is_and_takes_no_key_of_another(kind):
    assert kind.__doc__
    others = [each for each in parts.PARTS if each is not kind]
    assert set(kind.of_ranks).isdisjoint(key for each in others for key in each.of_ranks)
