"""The exercises: solutions get every point, each wrong answer loses its own and no other, and nbgrader agrees."""

import builtins
import functools
import importlib
import linecache
import re

import nbformat
import pytest
import torch

from memlab.book.checks import answers
from memlab.book.checks.limits import limited
from memlab.book.exercises import COURSE, sources
from memlab.book.notebooks import problems
from memlab.units import GiB
from tests import (
    exercises_caching_allocator,
    exercises_data_parallelism,
    exercises_gradient_accumulation,
    exercises_gradient_checkpointing,
    exercises_memory_arithmetic,
    exercises_memory_hierarchy,
    exercises_memory_monitoring,
    exercises_memory_timeline,
    exercises_mixed_precision,
    exercises_offloading,
    exercises_pipeline_parallelism,
    exercises_tensor_parallelism,
)

ANSWERS = {
    "memory_timeline": exercises_memory_timeline,
    "memory_arithmetic": exercises_memory_arithmetic,
    "memory_hierarchy": exercises_memory_hierarchy,
    "caching_allocator": exercises_caching_allocator,
    "memory_monitoring": exercises_memory_monitoring,
    "mixed_precision": exercises_mixed_precision,
    "gradient_accumulation": exercises_gradient_accumulation,
    "gradient_checkpointing": exercises_gradient_checkpointing,
    "offloading": exercises_offloading,
    "data_parallelism": exercises_data_parallelism,
    "tensor_parallelism": exercises_tensor_parallelism,
    "pipeline_parallelism": exercises_pipeline_parallelism,
}
NOTEBOOKS = {path.stem: path for path in sources()}
DEFAULT = 8
"""How many wrong answers of each exercise run by default: the first ones. Those in front differ most in the reason for
which they are refused; the others are marked thorough."""


@functools.cache
def cells(chapter):
    return [cell for cell in nbformat.read(NOTEBOOKS[chapter], as_version=4).cells if cell.cell_type == "code"]


def told(cell, field):
    return cell.metadata.get("nbgrader", {}).get(field)


def header(chapter):
    return nbformat.read(NOTEBOOKS[chapter], as_version=4).cells[0].source


def pairs(chapter):
    """Each answer's cell and the check that follows it, by their ids."""
    ids = [(told(cell, "grade_id"), told(cell, "solution"), told(cell, "grade")) for cell in cells(chapter)]
    answered = None
    for grade_id, is_answer, is_check in ids:
        answered = grade_id if is_answer else answered
        if is_check:
            yield answered, grade_id


def run(source, name, space):
    """Execute a cell under limits; None, or the error it ended with."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        with limited(10, GiB):
            exec(compile(source, name, "exec"), space)
    except BaseException as error:
        return error


@functools.cache
def given(chapter):
    """The names that a notebook's given cells make."""
    space = {"__name__": "__main__", "__builtins__": builtins}
    for number, cell in enumerate(cells(chapter)):
        if not told(cell, "solution") and not told(cell, "grade"):
            assert run(cell.source, f"<given cell {number} of {chapter}>", space) is None
    return space


def checked(chapter, cell, source):
    """What the check of one answer cell says of a source put there: None, or its error."""
    space = dict(given(chapter))
    run(source.strip(), f"<{cell} of {chapter}>", space)
    return run(calls(chapter)[cell], f"<check of {cell}>", space)


def solutions(chapter):
    """Each answer cell's id and its solution."""
    return {told(cell, "grade_id"): cell.source for cell in cells(chapter) if told(cell, "solution")}


@pytest.fixture
def fast(monkeypatch):
    """Checks that are not read from disk anew for each cell."""
    monkeypatch.setattr(importlib, "reload", lambda module: module)


WRONG = [
    pytest.param(chapter, cell, mistake, marks=() if place < DEFAULT else pytest.mark.thorough)
    for chapter, module in ANSWERS.items()
    for cell, mistakes in module.WRONG.items()
    for place, mistake in enumerate(mistakes)
]
RIGHT = [
    (chapter, cell, style)
    for chapter, module in ANSWERS.items()
    for cell, ways in module.RIGHT.items()
    for style in ways
]


def calls(chapter):
    """Each answer cell's id and the source of its check."""
    sources = {told(cell, "grade_id"): cell.source for cell in cells(chapter)}
    return {answer: sources[check] for answer, check in pairs(chapter)}


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first optimizer of a process makes torch import for seconds; and two cores need no threads for so little."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_assignment_has_wrong_answers_for_each_exercise():
    assert set(ANSWERS) == set(NOTEBOOKS)
    for chapter, module in ANSWERS.items():
        assert set(module.WRONG) == {answer for answer, _ in pairs(chapter)} and len(module.WRONG) >= 4
        assert set(module.RIGHT) <= set(module.WRONG) and min(map(len, module.WRONG.values())) >= 5


def test_every_chapter_has_exercises_and_says_where():
    chapters = [path for path in sorted(COURSE.parent.glob("[0-9][0-9]_*.ipynb")) if not path.name.startswith("00_")]
    assert [path.stem for path in chapters] == [path.parent.name for path in sources()]
    for path in chapters:
        released = f"exercises/release/{path.stem}/{path.stem[3:]}.ipynb"
        assert f"]({released})" in path.read_text(encoding="utf-8") and (COURSE.parent / released).is_file()


@pytest.mark.parametrize("chapter", NOTEBOOKS)
def test_a_source_is_clean_and_says_goal_minutes_points_and_hints_of_each_exercise(chapter):
    assert problems(NOTEBOOKS[chapter]) == []
    told_points = []
    for cell in nbformat.read(NOTEBOOKS[chapter], as_version=4).cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            minutes, worth = re.search(r"\*\*Goal:\*\* .+ \*\*(\d+) minutes, (\d+) points?\.\*\*", cell.source).groups()
            told_points.append(int(worth))
            title = re.escape(cell.source.splitlines()[0].split(" · ")[1])
            assert re.search(rf"\| {title} \| {minutes} \| {worth} \|", header(chapter)), title
    assert sum(told_points) == sum(told(cell, "points") for cell in cells(chapter) if told(cell, "grade"))
    assert f"{sum(told_points)} points" in header(chapter)
    text = "".join(c.source for c in nbformat.read(NOTEBOOKS[chapter], as_version=4).cells)
    assert text.count("<details><summary>Hint") >= len(told_points) and "Explain the discrepancy" in text


@pytest.mark.parametrize("chapter", ANSWERS)
def test_each_solution_alone_gets_its_points(chapter, fast):
    assert {cell: checked(chapter, cell, source) for cell, source in solutions(chapter).items()} == dict.fromkeys(
        solutions(chapter)
    )


@pytest.mark.parametrize(("chapter", "cell", "mistake"), WRONG)
def test_a_wrong_answer_loses_its_points_and_is_told_why(chapter, cell, mistake, fast, monkeypatch):
    if "endless" in mistake:
        monkeypatch.setattr(answers, "CHECK_SECONDS", 1)
    error = checked(chapter, cell, ANSWERS[chapter].WRONG[cell][mistake])
    unsaid = isinstance(error, NameError) and mistake in ("a syntax error", "an empty cell")
    assert unsaid or (isinstance(error, answers.Wrong) and len(str(error)) > 20)
    assert unsaid or "your code raised" not in str(error) or mistake in ANSWERS[chapter].CRASHES, error


def test_a_plan_that_depends_on_the_order_of_the_list_is_told_of_ties(fast):
    mistake = exercises_caching_allocator.WRONG["offsets-answer"]["largest first, of equals as they are listed"]
    assert "of equally large ones" in str(checked("caching_allocator", "offsets-answer", mistake))


def test_a_weight_that_is_no_parameter_of_the_layer_is_not_said_to_be_a_copy(fast):
    mistake = exercises_memory_arithmetic.WRONG["lora-linear-answer"]["W where no state_dict finds it"]
    assert "no parameter or buffer" in str(checked("memory_arithmetic", "lora-linear-answer", mistake))


def test_a_stage_that_holds_a_gradient_back_for_a_forward_is_asked_about_that(fast):
    mistake = exercises_pipeline_parallelism.WRONG["groups-answer"]["a lower limit for each stage"]
    told = str(checked("pipeline_parallelism", "groups-answer", mistake))
    assert "at most 2: the orders are complete" in told and "or for a forward while its next gradient is there?" in told


def test_within_a_group_a_stage_may_hold_what_1f1b_holds_there(fast):
    mistake = exercises_pipeline_parallelism.WRONG["groups-answer"]["GPipe in each group"]
    told = str(checked("pipeline_parallelism", "groups-answer", mistake))
    assert "at most 2: stage 3 holds 2 micro-batches at once; 1 may be. That many forwards are enough" in told


RETURNING = [
    ("offloading", "note-answer", "note"),
    ("data_parallelism", "moves-answer", "moves"),
    ("data_parallelism", "once-answer", "side_by_side"),
    ("data_parallelism", "averaged-answer", "averaged"),
    ("tensor_parallelism", "ranges-answer", "qkv_ranges"),
    ("tensor_parallelism", "part-answer", "part_of"),
    ("tensor_parallelism", "copy-answer", "copy_to_ranks"),
    ("tensor_parallelism", "once-answer", "row_parallel"),
    ("tensor_parallelism", "again-answer", "column_parallel_rows"),
    ("pipeline_parallelism", "order-answer", "order"),
]


@pytest.mark.parametrize(("chapter", "cell", "name"), RETURNING)
def test_a_missing_return_is_asked_for_where_none_came_back_and_not_where_a_number_did(chapter, cell, name, fast):
    told_none, told_number = (
        str(checked(chapter, cell, f"{name} = lambda *given: {returned}")) for returned in ("None", "3.5")
    )
    assert "is a return missing?" in told_none and "expected" in told_number
    assert "float" in told_number and "return missing" not in told_number


MAKING = [
    ("memory_monitoring", "mended-answer", "Mended", "step"),
    ("memory_monitoring", "sampler-answer", "Sampler", "__enter__"),
    ("mixed_precision", "split-masters-answer", "SplitMasters", "step"),
    ("offloading", "home-answer", "HostAdam", "step"),
    ("data_parallelism", "sharded-answer", "ShardedAdam", "step"),
    ("pipeline_parallelism", "lean-answer", "LeanStage", "forward"),
]


@pytest.mark.parametrize(("chapter", "cell", "name", "method"), MAKING)
def test_a_method_that_is_missing_is_named_and_no_error_of_the_checks_own_is_told(chapter, cell, name, method, fast):
    told_none, told_object = (
        str(checked(chapter, cell, f"{name} = lambda *given: {made}")) for made in ("None", "object()")
    )
    assert f"to have a method {method}(), found None (is a return missing?)." in told_none
    assert f"to have a method {method}(), found object." in told_object


@pytest.mark.parametrize(("chapter", "cell", "style"), RIGHT)
def test_another_right_answer_gets_its_points(chapter, cell, style, fast):
    error = checked(chapter, cell, ANSWERS[chapter].RIGHT[cell][style])
    assert error is None, error


def all_right_after(chapter, wrong, right):
    """Wrong answers in one program, one after the other, and then right ones."""
    space = dict(given(chapter))
    for cell, mistake in wrong:
        if "endless" not in mistake:
            run(ANSWERS[chapter].WRONG[cell][mistake].strip(), f"<{mistake}>", space)
            run(calls(chapter)[cell], f"<check of {mistake}>", space)
    for cell, source in right.items():
        assert run(source, f"<{cell}>", space) is None
        assert run(calls(chapter)[cell], f"<check of {cell}>", space) is None, cell


@pytest.mark.parametrize("chapter", ANSWERS)
def test_wrong_answers_cost_no_later_right_one_a_point(chapter, fast):
    wrong = [(cell, mistake) for cell, mistakes in ANSWERS[chapter].WRONG.items() for mistake in list(mistakes)[:3]]
    all_right_after(chapter, wrong, solutions(chapter))


@pytest.mark.thorough
@pytest.mark.parametrize(("chapter", "cell"), [(chapter, cell) for chapter in ANSWERS for cell in solutions(chapter)])
def test_wrong_answers_cost_no_other_exercise_a_point(chapter, cell, fast):
    others = {other: source for other, source in solutions(chapter).items() if other != cell}
    all_right_after(chapter, [(cell, mistake) for mistake in list(ANSWERS[chapter].WRONG[cell])[:DEFAULT]], others)
