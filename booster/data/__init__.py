"""Data loaders for ranks that share a dataset: made, checked, and boosted, with batches on the device and epochs counted."""

from booster.data.boosted_loader import DataLoaderWrapper, YieldedRows, to_device
from booster.data.epoch_iterator import DRAWS, OWN_STATE, skips
from booster.data.samplers import check_dealt, check_sharded
from booster.data.seeded_loader import SeededDataLoader, prepare_dataloader

__all__ = [
    "DRAWS",
    "OWN_STATE",
    "DataLoaderWrapper",
    "SeededDataLoader",
    "YieldedRows",
    "check_dealt",
    "check_sharded",
    "prepare_dataloader",
    "skips",
    "to_device",
]
