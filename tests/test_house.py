"""The house rules of memlab, each with a broken copy that shows the rule can fail."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

import memlab
from memlab.book.map import CHAPTERS
from memlab.book.notebooks import problems
from tests import nbval_policy

ROOT = Path(__file__).parents[1]

COMMANDS = ("record", "benchmark", "__main__")
# These exist to drive Jupyter and matplotlib; importing them may do what those do.
DRIVERS = """
    notebooks run exercises style figures explorer interactive predictions numbers curves tradeoff segments
    batches block_map hierarchy roofline tiles overlap ranks_pictures ring_pictures split_pictures
    tensor_pictures gantt schedule_pictures pipeline_sliders mesh_pictures axes_pictures monitor_pictures
    monitor_sliders live_changes live
"""
DRIVERS = tuple(f"memlab.book.{name}" for name in DRIVERS.split())


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return root


def module_files(root: Path) -> dict[str, Path]:
    """Every module of memlab by its dotted name."""
    files = {}
    for path in sorted((root / "memlab").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def misnamed(root: Path) -> list[str]:
    found = []
    chapters = {}
    for path in sorted((root / "chapters").glob("*.ipynb")):
        match = re.fullmatch(r"(\d\d)_([a-z_]+)\.ipynb", path.name)
        if match is None:
            found.append(f"{path.name}: expected NN_name.ipynb")
        elif match[1] != "00":
            chapters[match[2]] = match[1]
    for name, number in chapters.items():
        if name not in CHAPTERS or CHAPTERS.index(name) != int(number) - 1:
            found.append(f"chapter {number}_{name} is not in the order of chapters")
    modules = {name for name in CHAPTERS if f"memlab.{name}" in module_files(root)}
    for name in sorted(modules | set(chapters)):
        number = CHAPTERS.index(name) + 1 if name in CHAPTERS else 0
        if name not in chapters:
            found.append(f"memlab.{name} has no chapters/{number:02}_{name}.ipynb")
        if name not in modules:
            found.append(f"chapter {name} has no memlab/{name}.py or memlab/{name}/")
        if not (root / "tests" / f"test_{name}.py").exists():
            found.append(f"{name} has no tests/test_{name}.py")
    return found


def test_one_technique_has_one_name_everywhere():
    assert misnamed(ROOT) == []


def test_a_missing_chapter_module_or_test_is_noticed(tmp_path):
    names = ("chapters/01_memory_timeline.ipynb", "memlab/memory_timeline.py", "tests/test_memory_timeline.py")
    assert misnamed(write(tmp_path, dict.fromkeys(names, ""))) == []
    for name in names:
        (tmp_path / name).unlink()
        assert len(misnamed(tmp_path)) == 1
        write(tmp_path, {name: ""})
    assert len(misnamed(write(tmp_path, {"chapters/02_memory_timeline.ipynb": ""}))) == 1
    assert "expected NN_name.ipynb" in misnamed(write(tmp_path, {"chapters/Draft.ipynb": ""}))[0]


EVIDENCE = "evidence()"
NOT_COMPARED = {
    "00_start_here": {"machine()": "names this machine"},
    "01_memory_timeline": {
        "images, labels =": "seconds, and a convolution's workspace, which its kernel for this processor chooses",
        "activities =": "a profiler's figures, which another version of PyTorch counts otherwise",
    },
    "02_memory_arithmetic": {},
    "03_memory_hierarchy": {
        "my_ratio = 3": "bandwidths of this machine",
        "disk = disk_bandwidth()": "bandwidths of this machine's disk",
        "def seconds(attention": "seconds",
    },
    "04_caching_allocator": {
        "times(TRACES, managers)": "microseconds an event",
        "from memlab.caching_allocator import compare": "a table of all GPUs that are recorded",
    },
    "05_memory_monitoring": {
        "display(what_they_cost(looks))": "seconds, and versions of tools",
        "from memlab.book.live": "the system's figures of this process",
        'program = "import time': "the system's figures of another process",
    },
    "06_mixed_precision": {
        "def gradients_of": "gradients of a text that differs between versions of Python",
        "def learn": "losses of a text that differs between versions of Python",
    },
    "07_gradient_accumulation": {
        "batch = tuple": "rounding errors, which a processor's sums decide",
        "short = [min": "seconds",
    },
    "08_gradient_checkpointing": {"from memlab.book.measures.timing": "seconds"},
    "09_offloading": {"from memlab.book.measures.offloading": "seconds"},
    "13_data_parallelism": {},
    "14_tensor_parallelism": {},
    "15_pipeline_parallelism": {"from memlab.book.schedule_pictures": "seconds"},
}
"""The cells that nbval does not compare, by how they begin, each with its reason; and the last of each but 00."""


def compared_and_not(path: Path) -> tuple[int, list[str]]:
    """How many cells of a notebook are compared, and the sources of the others."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    ignored = [cell.source for cell in cells if "nbval-ignore-output" in cell.metadata.get("tags", [])]
    return len(cells) - len(ignored), ignored


@pytest.mark.parametrize("chapter", NOT_COMPARED)
def test_each_cell_is_compared_or_has_a_reason_in_the_list(chapter):
    compared, ignored = compared_and_not(ROOT / "chapters" / f"{chapter}.ipynb")
    reasons = NOT_COMPARED[chapter] | (
        {} if chapter == "00_start_here" else {EVIDENCE: "sets this machine beside GPUs"}
    )
    assert len(ignored) == len(reasons)
    assert all(source.startswith(start) for source, start in zip(ignored, reasons, strict=True))
    assert nbval_policy.COMPARED[chapter] == compared


def test_every_chapter_says_how_many_of_its_cells_are_compared():
    chapters = [path.stem for path in sorted((ROOT / "chapters").glob("*.ipynb"))]
    assert chapters == list(NOT_COMPARED) == list(nbval_policy.COMPARED)


def imported(name: str, path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function, by its absolute dotted name."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


SHELF = {"units", "checking", "files", "backward"}
"""Pages that all parts use: the very bottom."""


def floor_of(module: str) -> tuple[str, set[str]]:
    """The part of memlab that a module belongs to, and the parts that it may import."""
    part = (module.split(".") + ["memlab"])[1]
    if part in CHAPTERS:
        number = CHAPTERS.index(part)
        return part, {part, *SHELF, *(["ranks"] if number > 0 else []), *CHAPTERS[:number]}
    if part == "ranks":
        return part, {part, *SHELF, CHAPTERS[0]}
    if part in ("book", *COMMANDS):
        return part, {part, *SHELF, "ranks", "book", "record", "benchmark", *CHAPTERS}
    return part, SHELF if part in SHELF else set()


def leaning(root: Path) -> list[str]:
    found = []
    for name, path in module_files(root).items():
        part, allowed = floor_of(name)
        for target in imported(name, path):
            other = target.split(".")[1] if target.startswith("memlab.") else ""
            if target.split(".")[0] == "tests":
                found.append(f"{name} imports {target}: nothing imports tests")
            elif other and other not in allowed and not other.startswith("__version"):
                found.append(f"{name} imports {target}: {part} may use {', '.join(sorted(allowed)) or 'nothing'}")
    return found


def test_a_module_uses_only_what_the_reader_has_met():
    assert leaning(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("memlab/memory_timeline.py", "from memlab.offloading import swap_activations"),
        ("memlab/memory_timeline/page.py", "def f():\n    from ..offloading import swap_activations"),
        ("memlab/memory_timeline/__init__.py", "from ..ranks import run_ranks"),
        ("memlab/offloading.py", "from memlab import book"),
        ("memlab/offloading.py", "import memlab.book.claims"),
        ("memlab/units.py", "from memlab.memory_timeline import Meter"),
        ("memlab/ranks/page.py", "from memlab import memory_arithmetic"),
        ("memlab/__init__.py", "from . import units"),
        ("memlab/book/claims.py", "from tests import test_house"),
    ],
)
def test_leaning_on_an_unopened_box_is_noticed(tmp_path, file, source):
    assert len(leaning(write(tmp_path, {file: source}))) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "memlab/offloading.py",
            "import torch\nfrom memlab.units import KiB\nfrom memlab import memory_timeline, ranks",
        ),
        ("memlab/memory_timeline/page.py", "from .meter import Meter\nfrom memlab.memory_timeline.lines import Line"),
        ("memlab/ranks/page.py", "from .launch import run_ranks\nfrom memlab.memory_timeline import Meter"),
        ("memlab/book/claims.py", "from memlab.offloading import swap\nfrom . import table"),
        ("memlab/benchmark.py", "from memlab import __version__, book, memory_timeline"),
    ],
)
def test_standing_on_a_lower_floor_is_allowed(tmp_path, file, source):
    assert leaning(write(tmp_path, {file: source})) == []


def around_the_front_door(name: str, path: Path) -> list[str]:
    """What a file imports from an inner module of a technique though the package gives it by name."""
    found = []
    for target in imported(name, path):
        front, _, inner = target.removeprefix("memlab.").partition(".")
        if target.startswith("memlab.") and front in (*CHAPTERS, "ranks") and "." in inner:
            package = importlib.import_module(f"memlab.{front}")
            if inner.rpartition(".")[2] in package.__all__:
                found.append(target)
    return found


@pytest.mark.parametrize("folder", ["tests", "memlab/book"])
def test_what_a_package_gives_by_name_is_not_taken_from_inside_it(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert [found for path in paths for found in around_the_front_door(path.stem, path)] == []


WATCH = """
import os, sys, threading
import torch  # what torch itself does at import is not memlab's doing

events, root = [], sys.argv[1]
STARTS = {
    "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "_winapi.CreateProcess",
    "socket.bind", "socket.connect", "tempfile.mkstemp", "tempfile.mkdtemp", "os.mkdir",
}

def watch(event, args):
    writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and args[0] != os.devnull
    if event in STARTS or writes:
        events.append(f"{event} {args[0]}")

sys.path.insert(0, root)
sys.addaudithook(watch)
threading.Thread.start = lambda thread: events.append(f"thread {thread.name}")
for name in sys.argv[2:]:
    __import__(name)
    if torch.cuda.is_initialized():
        events.append("CUDA initialised")
    if events:
        sys.exit(f"importing {name}: {', '.join(events)}")
"""


def import_in_fresh_process(root: Path, names: list[str]) -> str:
    command = [sys.executable, "-B", "-c", WATCH, str(root), *names]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False).stderr


def test_importing_memlab_starts_no_thread_process_or_file_and_touches_no_gpu():
    names = [name for name in module_files(ROOT) if name not in DRIVERS and not name.endswith("__main__")]
    assert import_in_fresh_process(ROOT, names) == ""


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nthreading.Thread(target=print).start()",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])",
        "open('left_behind', 'w').close()",
    ],
    ids=["thread", "process", "file"],
)
def test_an_import_that_starts_something_is_noticed(tmp_path, source):
    write(tmp_path, {"starter.py": source})
    assert "importing starter: " in import_in_fresh_process(tmp_path, ["starter"])


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import memlab", ("torch", "numpy", "matplotlib", "IPython", "transformers")),
        ("import memlab.memory_timeline", ("matplotlib", "IPython", "ipywidgets", "transformers", "nbformat")),
    ],
)
def test_an_import_brings_no_heavy_package(statement, unwanted):
    program = f"{statement}; import sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert set(unwanted).isdisjoint(loaded.split())


@pytest.mark.parametrize("path", sorted((ROOT / "chapters").glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_chapter_is_fit_to_be_committed(path):
    assert problems(path) == []


def ruff(root: Path, *arguments: str) -> str:
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "--config", ROOT / "pyproject.toml", root]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def test_ruff_has_nothing_to_say_about_library_tests_and_notebooks():
    assert ruff(ROOT, "check", "--quiet") == ""
    assert ruff(ROOT, "format", "--check") == ""


def committed_files(root: Path) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this copy is not a git checkout")
    return [root / name for name in listed.split("\0") if name and (root / name).is_file()]


# Written in pieces, so that this file does not name what it forbids.
MACHINES = re.compile("|".join(["/" + "work/", "/" + "root/", "/" + "tmp/bash", "file" + "://"]))
INDEX = re.compile(r"https?://[^\s'\")`]+/(?:simple|whl)\b[^\s'\")`]*|\bpypi\.[a-z.]*[a-z]|index" + r"-url[ =]\S+")
PUBLIC_INDEX = "https://download.pytorch.org/whl/cpu"


def naming_a_machine(paths: list[Path], root: Path) -> list[str]:
    found = []
    for path in paths:
        text = path.read_bytes().decode(errors="replace").replace(PUBLIC_INDEX, "the-index")
        text = text.replace("index-url the-index", "")
        for pattern in (MACHINES, INDEX):
            found += [f"{path.relative_to(root)}: {match[0]}" for match in pattern.finditer(text)]
    return found


def test_no_file_names_a_machine_or_a_package_registry():
    assert naming_a_machine(committed_files(ROOT), ROOT) == []


@pytest.mark.parametrize("text", ["cd /" + "work/main", "--index" + "-url=http://10.0.0.1", "from py" + "pi.org"])
def test_a_named_machine_is_noticed(tmp_path, text):
    path = write(tmp_path, {"notes.txt": text}) / "notes.txt"
    assert naming_a_machine([path], tmp_path) != []


def undocumented(root: Path) -> list[str]:
    """Modules, public functions, classes and their methods without a docstring.

    `forward` is told by its class, a setter by its getter.
    """
    found = []

    def visit(node: ast.AST, name: str) -> None:
        if ast.get_docstring(node) is None:
            found.append(name)
        if isinstance(node, ast.Module | ast.ClassDef):
            for child in node.body:
                public = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                decorators = getattr(child, "decorator_list", ())
                setter = any(getattr(decorator, "attr", "") == "setter" for decorator in decorators)
                if public and not setter and not child.name.startswith("_") and child.name != "forward":
                    visit(child, f"{name}.{child.name}")

    for name, path in module_files(root).items():
        visit(ast.parse(path.read_text(encoding="utf-8")), name)
    return found


def test_every_public_function_of_memlab_says_what_it_does():
    assert undocumented(ROOT) == []


def test_a_missing_docstring_is_noticed(tmp_path):
    source = '''
        """A module."""
        def told():
            """Told."""
            def inner(): pass
        def untold(): pass
        def _private(): pass
        class Thing:
            """A thing."""
            def __init__(self): pass
            def method(self): pass
    '''
    assert undocumented(write(tmp_path, {"memlab/x.py": source})) == ["memlab.x.untold", "memlab.x.Thing.method"]


def test_the_installed_version_is_the_one_in_the_source():
    installed = importlib.metadata.version("memlab")
    assert installed == memlab.__version__, "install it once more: python -m pip install -e '.[test]'"


def test_a_vendor_build_of_torch_satisfies_memlab_and_an_older_torch_does_not():
    wanted = next(map(Requirement, importlib.metadata.requires("memlab")))
    assert wanted.name == "torch"
    for version in ("2.11.0a0+eb65b36914.nv26.02", "2.11.0", "2.13.0+cpu", "3.0"):
        assert wanted.specifier.contains(version, prereleases=True)
    assert not wanted.specifier.contains("2.10.1")


TEST_LINES = 43_000
LINES = {
    "": 600,
    "ranks": 1_700,
    "memory_timeline": 2_400,
    "memory_timeline/imagined": 1_150,
    "memory_arithmetic": 2_000,
    "memory_hierarchy": 1_230,
    "caching_allocator": 2_640,
    "memory_monitoring": 3_600,
    "mixed_precision": 1_610,
    "gradient_accumulation": 1_000,
    "gradient_checkpointing": 2_180,
    "offloading": 3_550,
    "data_parallelism": 3_400,
    "tensor_parallelism": 2_570,
    "pipeline_parallelism": 3_230,
    "book": 26_000,
}
"""How many lines each part may have, data files at 120 characters a line. Who needs more takes them from somewhere."""


def lines_in(folder: Path) -> int:
    """The lines of the code in a folder, but for folders in it that have a budget of their own, or no code."""
    budgeted = {path for name in LINES if folder in (path := ROOT / "memlab" / name).parents}
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    own = [path for path in files if budgeted.isdisjoint(path.parents)]
    texts = [path.read_text(encoding="utf-8") for path in own]
    code = {".py", ".js", ".css"}
    return sum(
        len(text.splitlines()) if path.suffix in code else -(-len(text) // 120)
        for path, text in zip(own, texts, strict=True)
    )


@pytest.mark.parametrize("part", LINES)
def test_no_part_of_the_library_has_more_lines_than_its_budget(part):
    assert lines_in(ROOT / "memlab" / part) <= LINES[part]


def test_every_part_has_a_budget_and_those_of_the_techniques_come_to_what_they_may():
    written = [name for name in CHAPTERS if (ROOT / "memlab" / name).is_dir()]
    assert set(LINES) == {"", "ranks", *written, "memory_timeline/imagined", "book"}
    assert sum(LINES.values()) - LINES["book"] <= 33_000


def test_the_tests_have_no_more_lines_than_their_budget():
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").glob("*.py"))
    assert lines <= TEST_LINES


def readme_commands(root: Path) -> list[str]:
    """What README tells a reader to type: the lines of its `sh` blocks."""
    blocks = re.findall(
        r"^```sh\n(.*?)^```$", (root / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return [line for block in blocks for line in block.splitlines()]


def test_readme_has_two_commands_of_one_line_each_with_its_environment():
    commands = readme_commands(ROOT)
    assert len(commands) == 2
    assert all("python3 -m venv --system-site-packages .venv" in command for command in commands)
    assert commands[0].endswith(" chapters")
    assert commands[1].endswith(".venv/bin/python -m pytest -n 2 --dist loadfile")


def test_the_example_in_readme_runs():
    example = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.M)[
        1
    ]
    result = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "parameter 0.weight" in result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "dash", "sh"])
def test_readme_commands_are_read_by_every_shell(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for command in readme_commands(ROOT):
        subprocess.run([shell, "-n", "-c", command], check=True, timeout=30)


def test_ci_runs_both_commands_of_readme_and_has_no_copy_of_them():
    script = ROOT / ".ci" / "run"
    text = script.read_text(encoding="utf-8")
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    patterns = re.findall(r"grep -E -- '([^']+)' README\.md", text)
    found = [line for pattern in patterns for line in lines if re.search(pattern, line)]
    assert found == readme_commands(ROOT)
    assert "[test]" not in text and "[lab]" not in text
    if os.name == "posix":
        assert script.stat().st_mode & stat.S_IXUSR
