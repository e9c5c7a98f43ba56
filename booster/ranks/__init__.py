"""What the ranks of a job say to each other besides gradients and weights: decisions, names, small values, bytes.

A rank that raises, or takes another branch, while the others enter a collective leaves them waiting until the timeout of
the process group. So whatever may differ among ranks is agreed on first, and then all raise or none does. Two functions of
`agreement` do most of it::

    group of three ranks, the file is missing on rank 1

    gather("no file" if missing else None, group)    ->  [None, "no file", None]    on every rank: all raise, and name rank 1
    any_rank(missing, group)                         ->  True                       on every rank, for what needs no text

`group=None` means that this process is alone: nothing is sent, and the answer is this rank's own. A name says whether it is
a collective: `gather`, `any_rank`, `largest`, `all_or_none` are; each must be called by all ranks of the group, equally often.

Files, in reading order:

- `agreement.py`: `DistCoordinator`, for users: who am I, who goes first; values as JSON from every rank, flags, extremes;
  all raise or none. How tensors and bytes travel: backends know few dtypes and want contiguous memory. No pickle travels
  here; in a save the plans of `torch.distributed.checkpoint` do.

Everything above calls this room; it calls `common/` and `launch.py`. `common/hang_watchdog.py` has rounds of ranks that must
not wait in a collective. A decision of every step goes through `largest`, `agree_on_found_inf` or `all_reduce`; keep it at one
message of 8 bytes.
"""
