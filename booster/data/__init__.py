"""Data loaders for ranks that share a dataset: made, checked, boosted, and resumed in the middle of an epoch to the bit.

The idea: the position of a loader is the epoch, and how many batches of it were yielded. A loader that can skip, as those made
here, gives the same batches again from that alone, since its order follows from (seed, epoch). Any other loader makes its pass
again, from the random states of its beginning, and drops what was seen.

An example: 96 samples, batches of 16 on one rank, saved after the second batch of epoch 1, loaded on two ranks.

    state_dict()         {"epoch": 1, "batches": 2, "samples": 32, "order": {"samples": 96, "seed": 1024}}
    load_state_dict()    `position_of` compares it with the loader that is there now
    the next iter()      epoch 1 is set in the samplers; `start_after(32)` leaves out the first 32 of the order over all
    ranks; the other 64 are dealt to two ranks, so that each sample is seen once

The files, in the order in which a loader passes them:

    seeded_loader.py     `prepare_dataloader` and `SeededDataLoader`, which can skip.
    boosted_loader.py    `DataLoaderWrapper`, what `boost` returns: batches on the device, the position, and what
                         forbids to keep it.
    epoch_iterator.py    `EpochIterator`, one pass; `position_of`, which checks a position.
    epoch_randomness.py  what samplers of any loader say: how it is dealt to ranks (`check_dealt`), its order, its epoch;
                         generators found in any loader, their states, and who drew from them when.

`checkpoint/parts/run_objects.py` keeps positions, and knows which keys are each rank's own (`OWN_STATE`, `DRAWS`). The facade
reads `YieldedRows` to drop padded samples, and calls the checks. States are in checkpoints, so their keys stay.
"""

from booster.data.boosted_loader import DataLoaderWrapper, YieldedRows, to_device
from booster.data.epoch_iterator import DRAWS, OWN_STATE, skips
from booster.data.epoch_randomness import check_dealt, check_sharded, is_stateful
from booster.data.seeded_loader import SeededDataLoader, prepare_dataloader

__all__ = [
    "DRAWS",
    "OWN_STATE",
    "DataLoaderWrapper",
    "SeededDataLoader",
    "YieldedRows",
    "check_dealt",
    "check_sharded",
    "is_stateful",
    "prepare_dataloader",
    "skips",
    "to_device",
]
