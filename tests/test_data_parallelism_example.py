"""The package's own example: launched by itself, by torchrun, and on imagined ranks."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from memlab.ranks.example import Trained, place
from tests.example_helpers import ROOT, assert_torchrun_says, figures, printed

MODULE = "memlab.data_parallelism"


def test_the_example_says_the_same_by_itself_and_under_torchrun():
    chosen = ("--technique", "zero3", "--steps", "2")
    alone = printed(MODULE, *chosen, "--ranks", "2")
    assert "zero3, 2 ranks on " in alone
    assert_torchrun_says(alone, MODULE, *chosen)


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What the example says of each technique, by itself and with imagined ranks."""
    code = f"""
from {MODULE}.__main__ import TECHNIQUES, main
for technique in TECHNIQUES:
    main(["--technique", technique, "--ranks", "3"])
    main(["--technique", technique, "--imagined", "3"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    each = re.split(r"^(?=[a-z0-9-]+, 3 ranks on )", done.stdout, flags=re.MULTILINE)[1:]
    names = [text.split(",")[0] for text in each]
    assert names[::2] == names[1::2]
    return {name + kind: text for name, kind, text in zip(names, 4 * ["", " imagined"], each, strict=True)}


def test_every_technique_of_the_example_has_the_same_losses_and_a_smaller_peak_than_the_one_before(said):
    names = [name for name in said if "imagined" not in name]
    first, *others = ([float(loss) for loss in figures(said[name])[0]] for name in names)
    assert len(first) == 3 and others == [pytest.approx(first, abs=2e-6)] * 3  # printed to 1e-6, and sums may round
    peaks = [float(re.search(r"rank 0  peak +(\S+) MiB", said[name])[1]) for name in names]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4


def test_imagined_ranks_of_the_example_send_what_real_ones_send_and_have_no_losses(said):
    for name in [name for name in said if "imagined" not in name]:
        assert f"{name}, 3 ranks on imagined hardware\n" in said[f"{name} imagined"]
        losses, sent = figures(said[f"{name} imagined"])
        assert losses == [] and sent == figures(said[name])[1][:1]


def test_the_example_says_where_its_ranks_computed():
    on = lambda *devices: place([Trained([], 0, 0, device) for device in devices])  # noqa: E731
    assert on("cpu", "cpu") == "the CPU" and on("cuda:0") == "cuda:0" and on("cuda:0", "cuda:1") == "cuda:0 to cuda:1"


def test_the_example_refuses_no_ranks_and_no_steps(capsys):
    from memlab.data_parallelism.__main__ import main

    for wrong, words in (("--ranks", "one rank"), ("--imagined", "one rank"), ("--steps", "one step")):
        with pytest.raises(SystemExit):
            main([wrong, "0"])
        assert f"expected at least {words}, found 0" in capsys.readouterr().err
