"""The checks behind the exercises: what a check cell calls, for a reader at once and for nbgrader later.

    from importlib import reload
    from memlab.book import checks

    reload(checks).of("memory_timeline").largest_category(largest_category)

`reload` runs this page again, and then every module of memlab is taken from disk anew: whatever a submission has
put in their place, in the checks or in the meter that they measure with, does not count. The checks stand here and not
in the notebook, so neither the notebook nor the feedback shows them.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

if "of" in globals():  # reload() runs this page a second time in the same namespace; a first import touches nothing
    for _name in [name for name in sys.modules if name.split(".")[0] == "memlab"]:
        if _name not in ("memlab", "memlab.book", __name__):
            del sys.modules[_name]


def of(chapter: str) -> ModuleType:
    """The checks of a chapter, by its name. Raises ModuleNotFoundError for a chapter without exercises."""
    return importlib.import_module(f"{__name__}.{chapter}")
