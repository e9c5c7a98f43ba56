"""A rank-aware logger on top of the standard library's `logging`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.launch import environment_world_size

__all__ = ["DistLogger", "get_dist_logger"]


class DistLogger:
    """Log on chosen ranks; handlers, levels and formats are those of the standard logger of the same `name`.

    The rank is looked up at each call, so a logger made before `booster.launch` is right afterwards. Records carry
    `rank` and `world_size`, for formats such as "%(rank)s/%(world_size)s %(message)s". No collectives.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(arguments.instance("name", name, str, "the name of a logger"))
        if not self._logger.handlers:
            # As libraries do: without it, Python's last-resort handler would print warnings that were not asked for.
            self._logger.addHandler(logging.NullHandler())

    @property
    def name(self) -> str:
        return self._logger.name

    def info(self, msg: str, *, ranks: Iterable[int] | None = None) -> None:
        """Log `msg` at level INFO on `ranks` (None: on all)."""
        self._log(logging.INFO, msg, ranks)

    def warning(self, msg: str, *, ranks: Iterable[int] | None = None) -> None:
        """Log `msg` at level WARNING on `ranks` (None: on all)."""
        self._log(logging.WARNING, msg, ranks)

    def debug(self, msg: str, *, ranks: Iterable[int] | None = None) -> None:
        """Log `msg` at level DEBUG on `ranks` (None: on all)."""
        self._log(logging.DEBUG, msg, ranks)

    def error(self, msg: str, *, ranks: Iterable[int] | None = None) -> None:
        """Log `msg` at level ERROR on `ranks` (None: on all)."""
        self._log(logging.ERROR, msg, ranks)

    def set_level(self, level: str | int) -> None:
        """Drop records below `level`: a name such as "INFO", or a number of the `logging` module."""
        self._logger.setLevel(_level_number(level))

    def log_to_file(
        self, path: str | Path, mode: str = "a", level: str | int = "INFO", suffix: str | None = None
    ) -> Path:
        """Also write records of at least `level` to `path`/rank_N.log, or rank_N_suffix.log; return that file's path.

        path: a directory, made if missing.
        mode: "a" appends, "w" starts anew.
        level: a name such as "INFO", or a number of the `logging` module; where the logger itself drops records of that
            level, its own level is lowered to it.
        suffix: ends the file's name; None is none.

        Asking twice for one file attaches it once, at the level asked for last. Errors: RuntimeError in a launched job before
        `booster.launch`, when all ranks would share one file.
        """
        arguments.choice("mode", mode, ("a", "w"), fix="'a' appends, 'w' starts anew")
        if not isinstance(path, Path):
            arguments.text("path", path, "a directory, as a string or a Path")
        if suffix is not None:
            arguments.text("suffix", suffix, "a string that ends the file's name", also="None")
        number = _level_number(level)
        if not _initialized() and environment_world_size() > 1:
            raise RuntimeError("the rank is not known yet; call booster.launch_from_torch() before log_to_file()")
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        rank, world_size = _place()
        file = (directory / (f"rank_{rank}.log" if suffix is None else f"rank_{rank}_{suffix}.log")).absolute()
        files = [each for each in self._logger.handlers if isinstance(each, logging.FileHandler)]
        attached = [each for each in files if Path(each.baseFilename) == file]
        for handler in attached:
            handler.setLevel(number)
        if not attached:
            handler = logging.FileHandler(file, mode=mode, encoding="utf-8")
            handler.setFormatter(
                logging.Formatter(f"%(asctime)s %(levelname)s %(name)s rank {rank}/{world_size}: %(message)s")
            )
            handler.setLevel(number)
            self._logger.addHandler(handler)
        if not self._logger.isEnabledFor(number):
            self._logger.setLevel(number)
        return file

    def _log(self, level: int, msg: str, ranks: Iterable[int] | None) -> None:
        chosen: set[Any] | None = None
        if ranks is not None:
            several = isinstance(ranks, Iterable) and not isinstance(ranks, (str, bytes, Mapping, torch.Tensor))
            entries = list(ranks) if several else []
            if not several or not all(arguments.is_whole(rank) for rank in entries):
                raise TypeError(arguments.refusal("ranks", ranks, "a list of ranks, such as [0]", "None for all"))
            chosen = set(entries)
        if not self._logger.isEnabledFor(level):
            return
        rank, world_size = _place()
        if chosen is None or rank in chosen:
            # stacklevel 3 makes %(filename)s and %(lineno)d those of the caller of info(), warning(), ...
            self._logger.log(level, "%s", msg, stacklevel=3, extra={"rank": rank, "world_size": world_size})


def get_dist_logger(name: str = "booster") -> DistLogger:
    """Return a rank-aware logger over the standard logger called `name`.

    Nothing is printed until the application configures `logging` (for instance `logging.basicConfig(level="INFO")`)
    or calls `log_to_file`.
    """
    return DistLogger(name)


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if _initialized() else (0, 1)


def _level_number(level: str | int) -> int:
    if arguments.is_whole(level):
        return level
    names = logging.getLevelNamesMapping() if hasattr(logging, "getLevelNamesMapping") else _LEVELS
    if not isinstance(level, str) or level.upper() not in names:
        raise ValueError(
            f"level={arguments.shown(level)} is unknown; choose one of {sorted(names, key=lambda n: names[n])} or a number"
        )
    return names[level.upper()]


# Python 3.10 has no getLevelNamesMapping.
_LEVELS = {name: getattr(logging, name) for name in ("NOTSET", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
