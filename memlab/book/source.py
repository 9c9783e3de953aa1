"""Show the library's own source in a chapter, so that no copy of it can go stale there."""

from __future__ import annotations

import ast
import inspect
import textwrap


class Source:
    """Source text, shown as a highlighted block. language: python or c."""

    def __init__(self, where: str, text: str, language: str = "python"):
        self.where, self.text, self.language = where, text, language

    def __repr__(self) -> str:
        return f"{'//' if self.language == 'c' else '#'} {self.where}\n{self.text}"

    def _repr_markdown_(self) -> str:
        return f"```{self.language}\n{self!r}\n```"


def show_source(thing, *, docstring: bool = True) -> Source:
    """The source of a function, method, class or module as it stands in the library.

    docstring: False leaves the docstring out. Raises TypeError for what has no Python source.
    """
    try:
        text = textwrap.dedent(inspect.getsource(thing)).rstrip()
    except (TypeError, OSError) as error:
        raise TypeError(f"expected a function, class or module written in Python, found {thing!r} ({error})") from None
    if not docstring and thing.__doc__:
        text = _without_docstring(text, inspect.ismodule(thing))
    name = getattr(thing, "__qualname__", "")
    module = getattr(thing, "__module__", "") or thing.__name__
    return Source(f"{module}.{name}" if name else module, text)


def _without_docstring(text: str, is_module: bool) -> str:
    tree = ast.parse(text)
    first = (tree if is_module else tree.body[0]).body[0]
    match first:
        case ast.Expr(value=ast.Constant(value=str())):
            lines = text.splitlines()
            before, after = lines[: first.lineno - 1], lines[first.end_lineno :]
            return "\n".join(before).rstrip() + "\n" + "\n".join(after).lstrip("\n")
    return text
