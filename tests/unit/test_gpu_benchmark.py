"""`python -m benchmarks.gpu` says in one line that there is no GPU, and in one whether kernels may be the default."""

import pytest
import torch

from benchmarks import gpu, graphs
from benchmarks.launches import interprets

FAST = {
    "update": {"torch fused, clip": 2e-3, "fp32 by Triton": 1.5e-3},
    "tiny": {"torch fused, fp32": 2e-3, "fp32 by Triton": 1.9e-3},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_so_in_one_line_and_fails(capsys):
    assert gpu.main([]) == 2
    assert capsys.readouterr().out.count("\n") == 1


def test_kernels_may_be_the_default_where_they_are_right_and_no_slower():
    assert 'stays ("cuda",)' in gpu.verdict(FAST, {"fp32": 0.5})
    slow = {**FAST, "update": {"torch fused, clip": 1e-3, "fp32 by Triton": 1.5e-3}}
    assert gpu.verdict(slow, {"fp32": 0.5}).endswith("is to be (): update 1.50 of torch's fused")
    assert "is to be (): split 3 of what is tolerated" in gpu.verdict(FAST, {"split": 3.0})
    assert "is to be (): split nan of" in gpu.verdict(FAST, {"split": float("nan")})
    assert "update inf of" in gpu.verdict({}, {})  # what was not measured decides nothing


@pytest.mark.skipif(interprets(), reason="there they run")
def test_where_kernels_are_refused_it_says_why(capsys):
    assert gpu.main(["--device", "cpu", "--small", "--section", "kernels"]) == 0
    assert "verdict: none, fused_optimizer='triton' cannot step" in capsys.readouterr().out


@pytest.mark.skipif(not interprets(), reason="needs Triton, and TRITON_INTERPRET=1; `make kernels` runs it")
def test_kernels_train_as_torch_does():
    found = gpu.differences("cpu")
    assert len(found) == 9
    assert max(found.values()) <= 1.0


@pytest.mark.slow
def test_graphs_of_whole_models_are_timed_beside_the_same_by_hand(capsys):
    if not torch.cuda.is_available():
        assert graphs.main([]) == 2
    assert graphs.main(["--small", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.count("| captured, bf16 |") == said.count("| torch in a graph, fp16 |") == 4
    assert "Error" not in said
