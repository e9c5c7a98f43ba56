"""What the site adds to the pages: files outside docs/ that a page links to, figures for dark pages, the version.

On GitHub a link such as `../examples/extending/plugin.py` opens the file. Here it leads to a page that shows it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}  # file: page
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FIGURE = re.compile(r"^!\[([^\]]*)\]\((\S+)\.svg\)$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Say below every page which version it is of."""
    found = re.search(r'__version__ = "(.+)"', (ROOT / "booster/__init__.py").read_text())
    if found is None:
        raise ValueError("booster/__init__.py has no __version__")
    config.copyright = f"booster {found[1]}, MIT licence"
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that is linked."""
    for file, name in NAMES.items():
        files.append(File.generated(config, name, content=(ROOT / file).read_text()))
    for source in sorted({target for page in files.documentation_pages() for target in _sources(page)}):
        content = f"---\nsearch: {{boost: 0.5}}\n---\n# {source}\n\n```python\n{(ROOT / source).read_text()}```\n"
        files.append(File.generated(config, f"{source}.md", content=content))
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


def _in_repository(page: str, target: str) -> str:
    """The file of the repository that a link of a page means."""
    files = {name: file for file, name in NAMES.items()}
    folder = posixpath.dirname(files.get(page, f"docs/{page}"))
    return posixpath.normpath(posixpath.join(folder, target))


def _page_of(file: str) -> str:
    """The page of the site that shows a file of the repository."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return "index.md" if file == "README.md" else NAMES.get(file, f"{file}.md")


def _sources(page: File) -> set[str]:
    """The source files that a page links to."""
    targets = {_in_repository(page.src_uri, found[1]) for found in LINK.finditer(page.content_string)}
    return {target for target in targets if target.endswith(".py") and not target.startswith("docs/")}
