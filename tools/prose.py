"""Run proselint on the pages, without their code: `make docs` calls it. Writes what it finds; exit code 1 if that is anything.

Names, code, links and the addresses of HTML are blanked out, and lines stay where they are, so that numbers of lines hold.
"""

import itertools
import json
import re
import string
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs", "benchmarks/results"]
MADE = {"docs/reference/cli.md"}  # argparse wrote it
LEFT_OUT = (
    "typography.",
    "weasel_words.very",
)  # straight quotes, "3 x 4" and "resume" are meant; "the very first" is English
CODE = re.compile(
    r"^ *```.*?^ *```|<pre>.*?</pre>|^ {4,}\S.*?$|``?[^`\n]+``?|<[^>\n]+>|\[[^]\n]*\]\([^)\n]*\)",
    re.DOTALL | re.MULTILINE,
)


def blank(text: str) -> str:
    """`text` with a different word in place of every piece of code, a full stop after headings, and as many lines."""
    names = itertools.cycle("name" + letter for letter in string.ascii_lowercase)
    words = CODE.sub(lambda found: next(names) + "\n" * found[0].count("\n"), text)
    return re.sub(r"^(#+ .*|\|.*)$", r"\1.", words, flags=re.MULTILINE).replace("|", "; ")


def main() -> int:
    pages = [
        each for name in PAGES for each in ([ROOT / name] if name.endswith(".md") else (ROOT / name).rglob("*.md"))
    ]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for page in pages:
            copy = Path(folder) / page.relative_to(ROOT)
            if str(page.relative_to(ROOT)) not in MADE:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(blank(page.read_text()))
        command = [sys.executable, "-m", "proselint", "check", "-o", "json", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for address, result in json.loads(done.stdout)["result"].items():
            for each in result["diagnostics"]:
                if not each["check_path"].startswith(LEFT_OUT):
                    name = address.removeprefix(f"file://{folder}/")
                    found.append(f"{name}:{each['pos'][0]}: {each['check_path']}: {each['message']}")
    sys.stdout.write("\n".join([*sorted(found), f"proselint: {len(pages)} pages, {len(found)} findings\n"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
