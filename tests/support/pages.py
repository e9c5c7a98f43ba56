"""Runs the Python of a Markdown page, top to bottom, as in a notebook.

A page runs in a process of its own, forked from one that has imported torch and the library already: importing them takes
longer than most pages.
"""

import multiprocessing as mp
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

from pool import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 120.0  # seconds


class Ran(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def as_script(page: str) -> str:
    """The runnable Python of a page, every line at the number it has there; everything else is a blank line.

    `<!-- not run: REASON -->` on the line before a block exempts it.
    """
    script, language, exempt = [], None, False
    for line in page.splitlines():
        if line.startswith("```"):
            language = line[3:].strip() if language is None else None
            exempt = exempt and language is not None
            script.append("")
            continue
        if language is None and line.strip():
            exempt = re.fullmatch(r"<!-- not run: .+ -->", line.strip()) is not None
        script.append(line if language == "python" and not exempt else "")
    return "\n".join(script) + "\n"


def run_page(page: str, folder: Path) -> Ran:
    """Run the Python of `page` in `folder`, where only `examples` is at hand. Warnings are errors."""
    (folder / "page.py").write_text(as_script(page))
    (folder / "examples").symlink_to(ROOT / "examples")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_run, args=(str(folder),))
    process.start()
    process.join(TIMEOUT)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return Ran(process.exitcode, (folder / "stdout").read_text(), (folder / "stderr").read_text())


def _run(folder: str) -> None:
    os.chdir(folder)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # the batches of pages lie on the CPU, and so are their models, whatever there is
    )
    sys.path[:] = [folder, str(ROOT), *(path for path in sys.path if not path.startswith(str(ROOT / "tests")))]
    sys.argv = ["page.py"]
    warnings.resetwarnings()
    warnings.simplefilter("error")
    runpy.run_path("page.py", run_name="__main__")
