"""The package's own example: launched by itself, by a launcher, and on imagined ranks."""

from __future__ import annotations

import socket

import pytest
import torch

from memlab.data_parallelism.__main__ import TECHNIQUES, main
from tests.example_helpers import figures, peaks


def test_techniques_have_equal_losses_and_smaller_and_smaller_peaks_and_imagined_ranks_send_what_real_ones_send(
    capsys, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    losses, most = [], []
    for technique in TECHNIQUES:
        assert main(["--technique", technique, "--ranks", "2"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{technique}, 2 ranks on the CPU\n")
        losses.append([float(loss) for loss in figures(said)[0]])
        most.append(peaks(said)[0])
        assert main(["--technique", technique, "--imagined", "2"]) == 0
        imagined = capsys.readouterr().out
        assert imagined.startswith(f"{technique}, 2 ranks on imagined hardware\nloss    no values")
        assert figures(imagined) == ([], figures(said)[1][:1])
    first, *others = losses
    assert len(first) == 3 and others == [pytest.approx(first, abs=2e-6)] * 3  # printed to 1e-6, and sums may round
    assert most == sorted(most, reverse=True) and len(set(most)) == 4


def test_a_launcher_says_how_many_ranks_there_are_and_one_of_them_prints(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    assert main(["--steps", "1"]) == 0
    assert capsys.readouterr().out.startswith("data-parallel, 1 rank on the CPU\n")
