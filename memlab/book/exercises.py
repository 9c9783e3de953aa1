"""Make the students' version of the exercises from the instructor's, by nbgrader itself.

    python -m memlab.book.exercises                      execute chapters/exercises/source, then make release/ anew

The solutions are cut out and the check cells get nbgrader's checksums. The gradebook that nbgrader fills meanwhile is
thrown away: an instructor's own is made when the course is run (chapters/exercises/README.md).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from memlab.book.notebooks import execute, problems

COURSE = Path(__file__).parents[2] / "chapters" / "exercises"


def sources(course: str | Path = COURSE) -> list[Path]:
    """The instructor's notebooks, with the solutions."""
    return sorted(Path(course, "source").glob("*/*.ipynb"))


def release(course: str | Path, to: str | Path) -> None:
    """Write the students' version of every assignment into the folder `to`, in place of what is there.

    Raises RuntimeError with nbgrader's log if it refuses one (an unmarked solution, points missing …).
    """
    from nbgrader.apps import NbGraderAPI
    from traitlets.config import PyFileConfigLoader

    with tempfile.TemporaryDirectory() as folder, _own_programs():
        config = PyFileConfigLoader("nbgrader_config.py", path=str(course)).load_config()
        config.CourseDirectory.root = str(Path(course).resolve())
        config.CourseDirectory.release_directory = str(Path(folder, "release"))
        config.CourseDirectory.db_url = f"sqlite:///{folder}/gradebook.db"
        api = NbGraderAPI(config=config)
        for assignment in sorted({path.parent.name for path in sources(course)}):
            made = api.generate_assignment(assignment)
            if not made["success"]:
                raise RuntimeError(
                    f"{assignment}: nbgrader did not make its release\n{made['log']}{made['error'] or ''}"
                )
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(Path(folder, "release"), to)


@contextlib.contextmanager
def _own_programs() -> Iterator[None]:
    """nbgrader calls programs of its own environment by name, also where that is not activated; and the course's
    configuration sets variables that this process shall not keep."""
    before = dict(os.environ)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before.get("PATH", "")])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> int:
    """Execute the sources and make the release; the exit status is 1 if a source has a problem."""
    argparse.ArgumentParser(prog="python -m memlab.book.exercises", description=__doc__.splitlines()[0]).parse_args()
    found = []
    for path in sources():
        execute(path)
        found += [f"{path}: {problem}" for problem in problems(path)]
    release(COURSE, COURSE / "release")
    print("\n".join(found) or f"made {COURSE / 'release'}")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
