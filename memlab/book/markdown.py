"""Text as Markdown that shows it letter for letter: a line of code has stars, underscores, dollars and angles in it.

JupyterLab, VS Code and GitHub each read Markdown in their own way, so each sign is written in the form that all of
them know. A text without such signs stays as it is.
"""

from __future__ import annotations

import re

SIGNS = re.compile(
    r"""
      [*`~|]                                 # emphasis, code, strikethrough, a table's next cell
    | (?<![^\W_])_ | _(?![^\W_])             # __init__, but not optimizer_state: inside a word it means nothing
    | \](?=\()                               # a link: d["a"](x)
    | < | &(?=\#?\w+;)                       # HTML and its entities
    | [$\\]                                  # a formula, which MathJax looks for in the finished page
    """,
    re.VERBOSE,
)
# A formula must begin and end in one element, so a dollar in an element of its own begins none.
SPELT = {"<": "&lt;", "&": "&amp;", "$": "<span>&#36;</span>", "\\": "<span>&#92;</span>"}


def literal(text: str) -> str:
    r"""Markdown, of one line, that shows `text` as it stands.

    >>> print(literal("__init__: y = x**2"))
    \_\_init\_\_: y = x\*\*2
    """
    return SIGNS.sub(lambda sign: SPELT.get(sign[0], "\\" + sign[0]), text.replace("\n", " "))
