"""Binder can read binder/environment.yml: repo2docker prints the Dockerfile it would build, and needs no Docker."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("repo2docker", reason="jupyter-repo2docker is not installed (it does not run on Windows)")
from packaging.requirements import Requirement
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]


def dockerfile(repository: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", str(repository)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    return result.returncode, result.stdout + result.stderr


def pip_lines() -> list[str]:
    environment = YAML(typ="safe").load(ROOT / "binder" / "environment.yml")
    return next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))


def test_binder_builds_a_python_3_11_environment_from_our_file():
    status, printed = dockerfile(ROOT)
    assert status == 0, printed
    assert "python=3.11" in printed
    assert 'env update -p ${NB_PYTHON_PREFIX} --file "binder/environment.yml"' in printed
    assert printed.index("src/ ${REPO_DIR}/") < printed.index("env update"), "it installs after the repository is there"


def test_binder_brings_a_cpu_torch_that_memlab_accepts():
    lines = pip_lines()
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in lines
    pinned = next(line for line in lines if line.startswith("torch=="))
    version = pinned.removeprefix("torch==")
    assert version.endswith("+cpu")
    wanted = re.search(r'"(torch[^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert version in Requirement(wanted).specifier


def test_binder_installs_memlab_from_the_folder_above():
    editable = next(line for line in pip_lines() if line.startswith("-e "))
    folder, extras = re.fullmatch(r"-e (.+)\[(.+)\]", editable).groups()
    assert (ROOT / "binder" / folder / "pyproject.toml").is_file()
    assert extras == "lab"


def test_a_file_that_binder_cannot_read_is_noticed(tmp_path):
    shutil.copytree(ROOT / "binder", tmp_path / "binder")
    (tmp_path / "binder" / "environment.yml").write_text("- a list\n")
    status, printed = dockerfile(tmp_path)
    assert status != 0, printed
