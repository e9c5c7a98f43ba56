"""Streams: torch's IterableDataset, and webdataset's shards in tar files.

    python examples/integrations/iterable_dataset.py
    python examples/integrations/iterable_dataset.py webdataset     # pip install webdataset

No sampler can divide a stream, so the stream divides itself by rank and worker: take every so manieth sample, or, in
webdataset, every so manieth shard (`nodesplitter`). All ranks need equally many batches: end after a fixed number.
"""

import io
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import booster


class Counted(IterableDataset):
    """Samples 0, 1, 2, ... of which this rank and worker takes its part."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        coordinator, worker = booster.DistCoordinator(), get_worker_info()
        workers, index = (worker.num_workers, worker.id) if worker else (1, 0)
        parts = coordinator.world_size * workers
        for number in range(coordinator.rank * workers + index, 512, parts):
            x = torch.randn(8, generator=torch.Generator().manual_seed(number))
            yield x, x[:3].argmax()


def shards(folder: Path) -> DataLoader:
    import webdataset

    for shard in range(4):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(128):
                x = torch.randn(8, generator=torch.Generator().manual_seed(1000 * shard + number))
                for end, data in (("x.pth", _bytes(x)), ("cls", str(int(x[:3].argmax())).encode())):
                    entry = tarfile.TarInfo(f"{number:04}.{end}")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
    urls = [str(folder / f"{shard}.tar") for shard in range(4)]
    dataset = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=webdataset.split_by_node)
    read = lambda data: torch.load(io.BytesIO(data), weights_only=True)  # noqa: E731
    return DataLoader(dataset.to_tuple("x.pth", "cls").map_tuple(read, int).shuffle(100, seed=0), batch_size=16)


def _bytes(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def main(kind: str = "torch") -> None:
    booster.launch_from_torch(seed=0)
    model = torch.nn.Linear(8, 3)
    b = booster.Booster(mixed_precision="bf16", plugin=booster.plugin.TorchDDPPlugin())
    with tempfile.TemporaryDirectory() as folder:
        loader = shards(Path(folder)) if kind == "webdataset" else DataLoader(Counted(), batch_size=16)
        model, optimizer, criterion, loader, _ = b.boost(
            model, torch.optim.AdamW(model.parameters(), 3e-2), torch.nn.CrossEntropyLoss(), loader
        )
        losses = []
        for x, y in islice(loader, 14):
            loss = criterion(model(x), y)
            b.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(b.reduce(loss.detach()).item())
    b.print(f"{kind}: {len(losses)} batches, loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
