"""Docstrings of the library as Markdown: where one explains an argument, `name: what it is`, an item of a list begins."""

import re
from typing import Any

import griffe


class PlainDocstrings(griffe.Extension):
    """Rewrites each docstring before it is rendered."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = as_markdown(func.docstring.value, {each.name for each in func.parameters})

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring is not None:
            names = {each.name for each in cls.parameters}  # also where a base takes them
            cls.docstring.value = as_markdown(cls.docstring.value, {*names, *cls.members})


def as_markdown(text: str, names: set[str]) -> str:
    """`text` with paragraphs that explain some of `names` as lists, and all else as it is."""
    if not names:
        return text
    name = "|".join(re.escape(each) for each in sorted(names, key=len, reverse=True))
    item = re.compile(rf"(?:^|(?<=[.;)] )|(?<=[.;)]\n))((?:{name})(?:, (?:{name}))*): (?=\S)")
    paragraphs = []
    for paragraph in re.split(r"\n{2,}", text):
        begin, *rest = item.split(paragraph)
        parts = [begin.strip()] if begin.strip() else []
        items = []
        for names_of, words in zip(rest[::2], rest[1::2], strict=True):
            words = " ".join(words.split()).rstrip(";")
            items.append(f"- {', '.join(f'`{each}`' for each in names_of.split(', '))}: {words}")
        paragraphs += [*parts, *(["\n".join(items)] if items else [])]
    return "\n\n".join(paragraphs)
