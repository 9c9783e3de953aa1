"""The whole round, as README tells an instructor: right, partly right, malicious, and one who kills the kernel."""

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
README = " ".join((COURSE / "README.md").read_text(encoding="utf-8").split("\n"))
COMMANDS = re.findall(r"^nbgrader (.+)$", (COURSE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
# nbgrader's import takes seconds: it is imported once, and each command runs in a fork, in a folder.
DRIVER = """
import json, os, sys
from nbgrader.apps.nbgraderapp import NbGraderApp
statuses = []
for folder, words in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        os.chdir(folder)
        sys.argv[1:] = words.split()
        NbGraderApp.launch_instance()
        os._exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(statuses))
"""
# By default one assignment without ranks and one with them.
DEFAULT = ("01_memory_timeline", "13_data_parallelism")
each = pytest.mark.parametrize(
    "assignment", [pytest.param(a, marks=() if a in DEFAULT else pytest.mark.thorough) for a in ASSIGNMENTS]
)
# In one round: it says nothing of a chapter, and is waited for. It sleeps, so that rounds beside it lose nothing.
ENDLESS_IN = "memory_timeline"
KILLED_IN = next(iter(ASSIGNMENTS))  # the same: it is nbgrader that goes on to the next student
ATTEMPT = """
try:
    exit()
except SystemExit:
    pass
"""
ENDLESS = (
    ATTEMPT
    + """
import time
while True:
    time.sleep(0.1)
"""
)
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
    """What three students hand in, and in one round a fourth: name → notebook."""
    right = {told(cell, "grade_id"): cell.source for cell in cells(chapter) if told(cell, "solution")}
    wrong = {cell: next(iter(mistakes.values())) for cell, mistakes in ANSWERS[chapter].WRONG.items()}
    loops, hoards, exits, tampers, patches, *_ = right
    attack = right | {
        loops: f"{right[loops]}\n{ENDLESS if chapter == ENDLESS_IN else ATTEMPT}",
        hoards: f"hoard = [0] * (20 * 2**30 // 8)\n{right[hoards]}",
        exits: f"import os\nos._exit(0)\n{right[exits]}",
        tampers: wrong[tampers],
        dict(pairs(chapter))[tampers]: "print('Right.')",
        patches: PATCHED_CHECKS.format(chapter=chapter) + wrong[patches],
    }
    kill = right | {hoards: "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"}
    partly = {cell: right[cell] for cell in worked_out(chapter)}
    made = {"right": right, "partly right": partly, "malicious": attack}
    made |= {"killed": kill} if chapter == ASSIGNMENTS[KILLED_IN] else {}
    return {student: filled(nbformat.from_dict(notebook.copy()), sources) for student, sources in made.items()}


def worked_out(chapter):
    """What the student did who is partly right: the first half."""
    answers = [answer for answer, _ in pairs(chapter)]
    return answers[: (len(answers) + 1) // 2]


def points(chapter):
    """id of each answer → the points of its check."""
    worth = {told(cell, "grade_id"): told(cell, "points") for cell in cells(chapter)}
    return {answer: worth[check] for answer, check in pairs(chapter)}


def nbgrader(folder, *commands):
    """Run commands in a folder, or in another where a pair (folder, command) says so: exit statuses, what was said."""
    placed = [(str(folder), each) if isinstance(each, str) else (str(each[0]), each[1]) for each in commands]
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # nbgrader calls programs of its own
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(placed)],
        cwd=folder,
        env=os.environ
        | {"PATH": path, "JUPYTER_CONFIG_DIR": str(folder / "jupyter"), "JUPYTER_DATA_DIR": str(folder / "data")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def course_in(folder):
    """A copy of the course."""
    shutil.copytree(COURSE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    return folder


def hand_in(course, student, assignment, notebook):
    """Where README says that a student's notebook is collected to."""
    folder = course / "submitted" / student / assignment
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / f"{ASSIGNMENTS[assignment]}.ipynb")


def graded(course, assignment, chapter):
    """One assignment's round, by README's commands: folder, exit statuses and what was said."""
    course_in(course)
    released = nbformat.read(course / "release" / assignment / f"{chapter}.ipynb", as_version=4)
    for student, notebook in submissions(chapter, released).items():
        hand_in(course, student, assignment, notebook)
    commands = [re.sub(r"\b\d\d_[a-z_]+\b", assignment, command) for command in COMMANDS]
    return course, *nbgrader(course, *commands)


@pytest.fixture(scope="module")
def rounds(request, tmp_path_factory):
    """The rounds that are asked about, as many at once as there are cores: the checks have limits in seconds."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = dict.fromkeys(item.callspec.params["assignment"] for item in here)
    courses = {assignment: tmp_path_factory.mktemp(assignment) for assignment in asked}
    chapters = [ASSIGNMENTS[assignment] for assignment in asked]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(courses, pool.map(graded, courses.values(), courses, chapters), strict=True))


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


@each
def test_scores_are_exact_and_one_student_cannot_stop_anothers_grading(rounds, assignment):
    course, statuses, log = rounds[assignment]
    killed = assignment == KILLED_IN
    assert statuses == [0, killed, 0, 0], log  # autograde says that one could not be graded
    failed = f"There was an error processing assignment '{assignment}' for student "
    assert log.count(failed) == killed and (failed + "'killed'" in log) == killed
    worth = points(ASSIGNMENTS[assignment])
    total = sum(worth.values())
    kept = total - sum(list(worth.values())[1:5])  # the malicious student's loop stands behind a right answer
    assert scores(course) == {
        "right": (total, total),
        "partly right": (sum(worth[answer] for answer in worked_out(ASSIGNMENTS[assignment])), total),
        "malicious": (kept, total),
    } | ({"killed": (0, total)} if killed else {})


@each
def test_feedback_teaches_and_gives_nothing_away(rounds, assignment):
    course, *_ = rounds[assignment]
    chapter = ASSIGNMENTS[assignment]
    pages = {path.parts[-3]: path.read_text(encoding="utf-8") for path in course.glob("feedback/*/*/*.html")}
    assert set(pages) == {"right", "partly right", "malicious"}
    done, all_of_them = len(worked_out(chapter)), len(points(chapter))
    assert pages["partly right"].count("Not yet: there is no answer yet") == all_of_them - done
    assert pages["partly right"].count("Right. ") == done and pages["right"].count("Right. ") == all_of_them
    checks = COURSE.parents[1] / "memlab" / "book" / "checks"
    text = "".join(path.read_text(encoding="utf-8") for path in checks.glob(f"**/*{chapter}*/*.py"))
    text += "".join(path.read_text(encoding="utf-8") for path in checks.glob(f"{chapter}.py"))
    solved = "".join(cell.source for cell in cells(chapter))  # a traceback quotes the student's own right answer
    code = [line.strip() for line in text.splitlines() if len(line.strip()) > 50 and line.strip() not in solved]
    assert len(code) > 20 and not any(line in page for line in code for page in pages.values())


@each
def test_releasing_by_command_changes_nothing(rounds, assignment):
    course, *_ = rounds[assignment]
    name = f"{assignment}/{ASSIGNMENTS[assignment]}.ipynb"
    assert (course / "release" / name).read_bytes() == (COURSE / "release" / name).read_bytes()


@pytest.mark.parametrize("assignment", [KILLED_IN])
def test_a_submission_that_was_mended_is_graded_again_by_the_command_of_readme(rounds, assignment):
    """The last of this file: it changes a round's course."""
    course, chapter = rounds[assignment][0], ASSIGNMENTS[assignment]
    again = re.search(r"`nbgrader (autograde \S+ --student STUDENT --force)`", README)[1].replace("STUDENT", "killed")
    right = nbformat.read(course / "submitted" / "right" / assignment / f"{chapter}.ipynb", as_version=4)
    hand_in(course, "killed", assignment, right)
    assert nbgrader(course, again, "export")[0] == [0, 0]
    total = sum(points(chapter).values())
    assert scores(course)["killed"] == scores(course)["right"] == (total, total)


def test_the_exchange_of_a_hub_hands_out_and_collects(tmp_path):
    """By the commands that README names, and in between the two that a student's Assignment List runs."""
    assignment, chapter = next(iter(ASSIGNMENTS.items()))
    course, home, exchange = course_in(tmp_path / "course"), tmp_path / "home", tmp_path / "exchange"
    home.mkdir()
    exchange.mkdir(mode=0o777)
    exchange.chmod(0o777)
    places = f"--Exchange.root={exchange} --Exchange.cache={home / 'cache'}"
    release, collect = (
        f"{re.search(rf'`nbgrader ({name} {assignment})`', README)[1]} {places}"
        for name in ("release_assignment", "collect")
    )
    student = f"--course memlab {places}"
    statuses, said = nbgrader(
        course,
        f"generate_assignment {assignment} --force",
        release,
        (home, f"fetch_assignment {assignment} {student}"),
        (home, f"submit {assignment} {student}"),
        collect,
    )
    assert statuses == [0] * 5, said
    (handed_in,) = course.glob(f"submitted/*/{assignment}/{chapter}.ipynb")
    assert handed_in.read_bytes() == (COURSE / "release" / assignment / handed_in.name).read_bytes()
