"""launch_notebook: ranks forked from a notebook: its cells define what they run."""

import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from booster import DistCoordinator, launch_notebook


def test_each_rank_runs_the_function_launched_and_sees_what_was_made_before(tmp_path):
    made = torch.tensor([2.0])

    def work(folder, factor):  # as in a cell: no module has it
        total = made * factor * (dist.get_rank() + 1)
        dist.all_reduce(total)
        coordinator = DistCoordinator()
        text = f"{total.item()} {dist.get_world_size()} {coordinator.local_rank} {torch.initial_seed()}"
        (folder / str(dist.get_rank())).write_text(text)

    launch_notebook(work, 2, tmp_path, 10.0, backend="gloo", seed=5)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["60.0 2 0 5", "60.0 2 1 5"]
    assert not dist.is_initialized()


def test_the_traceback_of_a_rank_that_fails_is_raised_and_the_others_are_ended():
    def work():
        if dist.get_rank() == 1:
            raise ValueError("no such file as data.bin")
        dist.barrier()

    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="no such file as data.bin"):
        launch_notebook(work, 2, backend="gloo")


def test_a_process_that_used_cuda_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="has used CUDA.*restart the kernel"):
        launch_notebook(print, 2)


def test_a_process_with_a_group_is_refused(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="has a process group already"):
            launch_notebook(print, 2)
    finally:
        dist.destroy_process_group()


CELLS = [
    "import torch, booster",
    """
    def train(steps):
        model = torch.nn.Linear(4, 1)
        b = booster.Booster("cpu", "bf16", plugin=booster.plugin.TorchDDPPlugin())
        model, optimizer, criterion, _, _ = b.boost(
            model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.MSELoss()
        )
        x = torch.randn(32, 4)
        for _ in range(steps):
            loss = criterion(model(x), x.sum(1, keepdim=True))
            b.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        b.print(f"ranks {torch.distributed.get_world_size()} loss {loss.item():.4f}")
    """,
    "torch.randn(500, 500) @ torch.randn(500, 500)",  # threads of the notebook must not matter
    "booster.launch_notebook(train, 2, 20, backend='gloo')",
    "booster.launch_notebook(train, 2, 20, backend='gloo')",  # a cell is run again
]


@pytest.mark.slow
def test_cells_of_a_real_notebook_train_on_two_ranks(monkeypatch):
    needs = "needs nbclient and ipykernel: pip install nbclient ipykernel"
    nbformat, nbclient = pytest.importorskip("nbformat", reason=needs), pytest.importorskip("nbclient", reason=needs)
    pytest.importorskip("ipykernel", reason=needs)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "python3", "language": "python"}
    assert sys.executable
    nbclient.NotebookClient(notebook, timeout=600).execute()
    printed = ["".join(out.get("text", "") for out in cell.outputs) for cell in notebook.cells]
    assert printed[3].startswith("ranks 2 loss ")
    assert printed[3] == printed[4]
    assert float(printed[3].split()[-1]) < 1.0
