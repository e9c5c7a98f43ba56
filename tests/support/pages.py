"""Runs the Python of a Markdown page, top to bottom, as in a notebook."""

import os
import re
from pathlib import Path

from programs import ROOT, Ran, run

STRICTLY = """
import os, runpy, warnings
warnings.resetwarnings()
warnings.simplefilter("error")
names = runpy.run_path("before.py") if os.path.exists("before.py") else {}
runpy.run_path("page.py", names, run_name="__main__")
"""


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
    """Run the Python of `page` in `folder`, where only `examples` is at hand. Warnings are errors.

    `<!-- goes on from NAME.md -->` has that page of docs/ run first; its names are then there.
    """
    for name in re.findall(r"^<!-- goes on from (.+) -->$", page, re.MULTILINE):
        (folder / "before.py").write_text(as_script((ROOT / "docs" / name).read_text()))
    (folder / "page.py").write_text(as_script(page))
    (folder / "examples").symlink_to(ROOT / "examples")
    # The batches of pages lie on the CPU, and so are their models, whatever there is.
    return run(
        "-c", STRICTLY, folder=folder, environment={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    )
