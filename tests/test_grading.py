"""The whole round, as README tells an instructor, for four students: right, blank, malicious, and a killed kernel."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest

from memlab.book.exercises import COURSE, release, sources
from tests.test_exercises import ANSWERS, cells, pairs, told

pytest.importorskip("nbgrader", reason="nbgrader is not installed (memlab[instructor])")
if not hasattr(os, "fork"):
    pytest.skip("the round is tried where processes can fork", allow_module_level=True)

ASSIGNMENTS = {path.parent.name: path.stem for path in sources()}
COMMANDS = re.findall(r"^nbgrader (.+)$", (COURSE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
PATIENCE = "--Execute.timeout=12"  # in place of 30 s, for the endless loop
# nbgrader's import takes seconds: it is imported once, and each command runs in a fork.
DRIVER = """
import json, os, sys
from nbgrader.apps.nbgraderapp import NbGraderApp
statuses = []
for words in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        sys.argv[1:] = words
        NbGraderApp.launch_instance()
        os._exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(statuses))
"""
PATCHED_CHECKS = """
import memlab.memory_timeline
from memlab.book import checks

mine = checks.of({chapter!r})
for name in list(vars(mine)):
    if callable(getattr(mine, name)):
        setattr(mine, name, lambda *answers: print("Right."))
checks.of = lambda chapter: mine
memlab.memory_timeline.Meter = None
"""


def filled(notebook, source_of):
    """A released notebook with answers (and other cells) written over; `source_of`: id → source."""
    for cell in notebook.cells:
        cell.source = source_of.get(told(cell, "grade_id"), cell.source)
    return notebook


def submissions(chapter, notebook):
    """What four students hand in: name → notebook."""
    right = {told(cell, "grade_id"): cell.source for cell in cells(chapter) if told(cell, "solution")}
    wrong = {cell: next(iter(mistakes.values())) for cell, mistakes in ANSWERS[chapter].WRONG.items()}
    loops, hoards, exits, tampers, patches, *_ = right
    attack = right | {
        loops: f"{right[loops]}\nwhile True:\n    pass",
        hoards: f"hoard = [0] * (20 * 2**30 // 8)\n{right[hoards]}",
        exits: f"import os\nos._exit(0)\n{right[exits]}",
        tampers: wrong[tampers],
        dict(pairs(chapter))[tampers]: "print('Right.')",
        patches: PATCHED_CHECKS.format(chapter=chapter) + wrong[patches],
    }
    kill = right | {hoards: "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"}
    made = {"right": right, "blank": {}, "malicious": attack, "killed": kill}
    return {student: filled(nbformat.from_dict(notebook.copy()), sources) for student, sources in made.items()}


def points(chapter):
    """id of each answer → the points of its check."""
    worth = {told(cell, "grade_id"): told(cell, "points") for cell in cells(chapter)}
    return {answer: worth[check] for answer, check in pairs(chapter)}


def graded(course, assignment, chapter):
    """One assignment's round, by README's commands: folder, exit statuses and what was said."""
    shutil.copytree(COURSE, course, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    released = nbformat.read(course / "release" / assignment / f"{chapter}.ipynb", as_version=4)
    for student, notebook in submissions(chapter, released).items():
        folder = course / "submitted" / student / assignment
        folder.mkdir(parents=True)
        nbformat.write(notebook, folder / f"{chapter}.ipynb")
    commands = [re.sub(r"\b\d\d_[a-z_]+\b", assignment, command).split() for command in COMMANDS]
    for words in commands:
        words += [PATIENCE] if words[0] == "autograde" else []
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # nbgrader calls programs of its own
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(commands)],
        cwd=course,
        env=os.environ | {"PATH": path, "JUPYTER_CONFIG_DIR": str(course / "jupyter")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return course, json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    """Every assignment's round, as many at once as there are cores: the checks have limits in seconds."""
    courses = {assignment: tmp_path_factory.mktemp(assignment) for assignment in ASSIGNMENTS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(courses, pool.map(graded, courses.values(), courses, ASSIGNMENTS.values()), strict=True))


def scores(course):
    with open(course / "grades.csv", newline="", encoding="utf-8") as file:
        return {row["student_id"]: (float(row["score"]), float(row["max_score"])) for row in csv.DictReader(file)}


def test_readme_has_the_whole_round():
    assert [command.split()[0] for command in COMMANDS] == [
        "generate_assignment",
        "autograde",
        "generate_feedback",
        "export",
    ]


def test_the_released_notebooks_are_what_nbgrader_makes_of_the_sources(tmp_path):
    release(COURSE, tmp_path)
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.ipynb")}
    committed = {str(p.relative_to(COURSE / "release")): p.read_text() for p in (COURSE / "release").rglob("*.ipynb")}
    assert found == committed, "python -m memlab.book.exercises makes release/ anew"
    assert all("SOLUTION" not in text and text.count("raise NotImplementedError") >= 4 for text in found.values())


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_scores_are_exact_and_one_student_cannot_stop_anothers_grading(rounds, assignment):
    course, statuses, log = rounds[assignment]
    assert statuses == [0, 1, 0, 0], log  # autograde says that one could not be graded
    assert f"There was an error processing assignment '{assignment}' for student 'killed'" in log
    worth = points(ASSIGNMENTS[assignment])
    total = sum(worth.values())
    kept = total - sum(list(worth.values())[1:5])  # the malicious student's loop stands behind a right answer
    assert scores(course) == {
        "right": (total, total),
        "blank": (0, total),
        "malicious": (kept, total),
        "killed": (0, total),
    }


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_feedback_teaches_and_gives_nothing_away(rounds, assignment):
    course, *_ = rounds[assignment]
    chapter = ASSIGNMENTS[assignment]
    pages = {path.parts[-3]: path.read_text(encoding="utf-8") for path in course.glob("feedback/*/*/*.html")}
    assert set(pages) == {"right", "blank", "malicious"}
    assert pages["blank"].count("Not yet: there is no answer yet") == len(points(chapter))
    assert pages["right"].count("Right. ") == len(points(chapter))
    checks = COURSE.parents[1] / "memlab" / "book" / "checks"
    text = "".join(path.read_text(encoding="utf-8") for path in checks.glob(f"**/*{chapter}*/*.py"))
    text += "".join(path.read_text(encoding="utf-8") for path in checks.glob(f"{chapter}.py"))
    code = [line.strip() for line in text.splitlines() if len(line.strip()) > 50]
    assert len(code) > 20 and not any(line in page for line in code for page in pages.values())


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_releasing_by_command_changes_nothing(rounds, assignment):
    course, *_ = rounds[assignment]
    name = f"{assignment}/{ASSIGNMENTS[assignment]}.ipynb"
    assert (course / "release" / name).read_bytes() == (COURSE / "release" / name).read_bytes()
