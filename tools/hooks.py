"""What the site adds to the pages: files outside docs/ that a page links to, figures for dark pages, the version.

On GitHub a link such as `../examples/extending/plugin.py` opens the file. Here it leads to a page that shows it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}  # file: page
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
LONG_CODE = re.compile(r"<code>([^<]{18,})</code>")
FIGURE = re.compile(r"^!\[([^\]]*)\]\((\S+)\.svg\)$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Say below every page which version it is of."""
    found = re.search(r'__version__ = "(.+)"', (ROOT / "booster/__init__.py").read_text())
    if found is None:
        raise ValueError("booster/__init__.py has no __version__")
    config.copyright = f"booster {found[1]}, MIT licence"
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that is linked, by pages or by such files."""
    waiting = ["CONTRIBUTING.md", "CHANGELOG.md"]
    waiting += [target for page in files.documentation_pages() for target in _linked(page.src_uri, page.content_string)]
    while waiting:
        file = waiting.pop()
        name = _page_of(file)
        if files.get_file_from_path(name) is not None:
            continue
        text = (ROOT / file).read_text()
        if not file.endswith(".md"):
            language = "python" if file.endswith(".py") else "text"
            text = f"---\nsearch: {{boost: 0.5}}\nhide: [navigation, toc]\n---\n# {file}\n\n```{language}\n{text}```\n"
        files.append(File.generated(config, name, content=text))
        waiting += _linked(name, text)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to those pages, and show each figure in the colours of the page."""
    here = page.file.src_uri

    def turned(found: re.Match[str]) -> str:
        target = _page_of(_in_repository(here, found[1]))
        return posixpath.relpath(target, posixpath.dirname(here) or ".") + (found[2] or "")

    def in_both(found: re.Match[str]) -> str:
        dark = _in_repository(here, f"{found[2]}-dark.svg")
        if not (ROOT / dark).exists():
            return found[0]
        return f"![{found[1]}]({found[2]}.svg#only-light)\n![{found[1]}]({found[2]}-dark.svg#only-dark)"

    return LINK.sub(turned, FIGURE.sub(in_both, markdown))


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let long names and messages in tables break, so that the columns beside them are not pushed out of sight."""

    def breakable(found: re.Match[str]) -> str:
        return '<code class="long">' + re.sub(r"([/_.,(]+)", r"\1<wbr>", found[1]) + "</code>"

    return re.sub(r"<td.*?</td>", lambda cell: LONG_CODE.sub(breakable, cell[0]), html, flags=re.DOTALL)


def _in_repository(page: str, target: str) -> str:
    """The file of the repository that a link of a page means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_file_of(page)), target))


def _file_of(page: str) -> str:
    """The file of the repository that a page shows."""
    if (ROOT / "docs" / page).exists():
        return f"docs/{page}"
    outside = {_page_of(file.name): file.name for file in ROOT.glob("*.md")}
    return outside.get(page, page.removesuffix(".md"))


def _page_of(file: str) -> str:
    """The page of the site that shows a file of the repository."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return NAMES.get(file, file.lower() if file.endswith(".md") else f"{file}.md")


def _linked(page: str, text: str) -> list[str]:
    """The files outside docs/ that a page links to."""
    targets = {_in_repository(page, found[1]) for found in LINK.finditer(text)}
    return sorted(target for target in targets if not target.startswith("docs/") and (ROOT / target).is_file())
