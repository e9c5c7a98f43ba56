"""The harness of tests/gpu, on a stand-in for the device."""

import warnings

import pytest
import torch
from cuda_syncs import syncs_forbidden


@pytest.fixture
def modes(monkeypatch):
    """The modes that were set, on a torch that warns of the mode after it has turned it on."""
    modes: list[object] = [1]

    def turn(mode):
        modes.append(mode)
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", turn)
    return modes


def test_syncs_are_errors_inside_and_what_they_were_after_an_error_too(modes):
    with syncs_forbidden():
        assert modes[-1] == "error"
    assert modes[-1] == 1
    with pytest.raises(KeyError), syncs_forbidden():
        raise KeyError
    assert modes == [1, "error", 1, "error", 1]


@pytest.mark.usefixtures("modes")
def test_warnings_of_what_is_run_inside_are_seen():
    with pytest.warns(UserWarning, match="of the test"), syncs_forbidden():
        warnings.warn("of the test", UserWarning, stacklevel=1)
