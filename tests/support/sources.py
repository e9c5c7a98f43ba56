"""What Python files say, read and parsed once for all tests of a file that look at them."""

import ast
from functools import cache
from pathlib import Path


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree. The library's take 100 MB: who is through forgets them by `nodes_of.cache_clear()`."""
    return tuple(ast.walk(ast.parse(path.read_text())))
