"""Cut the excerpt in this folder out of the plain text of the whole Jargon File.

    python make_excerpt.py jargon.txt.gz

The choice is deterministic: the entries of the lexicon from the letter H to the letter O, in the order of the file.
Running it again writes the same bytes.
"""

import argparse
import gzip
import re
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent / "jargon_h_to_o.txt"
FIRST, END = "\n   :h:\n", "\n   :P.O.D.:"
LETTER = re.compile(r"\n  [A-Z]\n.*", re.DOTALL)  # a letter's heading and list of entries, which end the entry before
COARSE = re.compile(r"\b(?:bitch|crap\w*|fuck\w*|nazi\w*|piss\w*|rape|sex\w*|shit\w*)\b", re.IGNORECASE)


def excerpt(text: str) -> str:
    """The chosen entries, without the margin of three spaces, without those that hold a table or a coarse word."""
    lexicon = text[text.index(FIRST) : text.index(END)].replace("\N{NO-BREAK SPACE}", " ")
    entries = [LETTER.sub("", entry) for entry in re.split(r"\n(?=   :)", lexicon)]
    kept = [entry for entry in entries if entry.strip() and "│" not in entry and not COARSE.search(entry)]
    return "\n\n".join(re.sub(r"^   ", "", entry, flags=re.MULTILINE).strip() for entry in kept) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="cut the embedded excerpt of the Jargon File")
    parser.add_argument("source", type=Path, help="the whole file, jargon.txt.gz")
    text = gzip.decompress(parser.parse_args().source.read_bytes()).decode()
    OUTPUT.write_text(excerpt(text), encoding="utf-8")
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
