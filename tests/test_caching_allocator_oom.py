"""The out-of-memory message: every variant of its words, the sums behind it, and which remedy is named."""

import re

import pytest
import torch

from memlab.caching_allocator import explain_oom, read_oom
from memlab.units import GiB, KiB, MiB
from tests.harness import refusals, refused

TAIL = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html)"
)


def format_size(nbytes):
    """How PyTorch writes a size: two decimals, and up to 1024 of each unit."""
    for scale, unit in ((1, "bytes"), (KiB, "KiB"), (MiB, "MiB")):
        if nbytes <= 1024 * scale:
            return f"{nbytes} bytes" if scale == 1 else f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes / GiB:.2f} GiB"


def message(
    asked, total, free, allocated, unallocated, *, process=None, others=(), allowed=None, private=0, name="CUDA"
):
    text = f"{name} out of memory. Tried to allocate {format_size(asked)}. GPU 0 has a total capacity of "
    text += f"{format_size(total)} of which {format_size(free)} is free. "
    text += "".join(f"Process {pid} has {format_size(nbytes)} memory in use. " for pid, nbytes in others)
    if process is not None:
        text += f"Including non-PyTorch memory, this process has {format_size(process)} memory in use. "
    if allowed is not None:
        text += f"{format_size(allowed)} allowed; "
    text += f"Of the allocated memory {format_size(allocated)} is allocated by PyTorch, "
    if private:
        text += f"with {format_size(private)} allocated in private pools (e.g., CUDA Graphs), "
    return text + f"and {format_size(unallocated)} is reserved by PyTorch but unallocated." + TAIL


FULL = message(
    *(2 * GiB, 80 * GiB, 1.5 * GiB, 60 * GiB, 3 * GiB),
    process=65 * GiB,
    others=[(7, 9 * GiB), (8, 5 * GiB)],
    allowed=70 * GiB,
    private=512 * MiB,
)


def by_meaning(rows, part):
    (row,) = [row for row in rows if part in row.meaning]
    return row


def test_every_figure_of_the_longest_message_is_read():
    oom = read_oom(FULL)
    assert (oom.asked, oom.total, oom.free) == (2 * GiB, 80 * GiB, 1.5 * GiB)
    assert (oom.process, oom.others, oom.allowed) == (65 * GiB, 14 * GiB, 70 * GiB)
    assert (oom.allocated, oom.private, oom.unallocated) == (60 * GiB, 512 * MiB, 3 * GiB)
    assert oom.reserved == 63 * GiB and oom.besides == 2 * GiB and not oom.rejected
    rows = explain_oom(FULL)
    assert [row.nbytes for row in rows if not row.words] == [2 * GiB, 63 * GiB]  # two sums
    told = [row for row in rows if row.words and row.nbytes != 14 * GiB]
    assert len(told) == 8 and all(row.words in FULL and format_size(row.nbytes) in row.words for row in told)
    assert [row.words for row in rows if row.nbytes == 14 * GiB] == [
        "Process 7 has 9.00 GiB memory in use. Process 8 has 5.00 GiB memory in use."
    ]
    assert {row.level for row in rows} == {"driver", "reserved", "allocated", "reserved, not allocated"}


@pytest.mark.parametrize("name", ["CUDA", "HIP", "XPU"])
def test_the_shortest_message_of_every_vendor_is_read(name):
    text = message(2 * GiB, 80 * GiB, GiB, 60 * GiB, GiB, name=name)
    oom = read_oom(text)
    assert oom.process is oom.others is oom.allowed is oom.private is oom.besides is None
    assert oom.elsewhere == 18 * GiB
    assert "neither free nor PyTorch's" in by_meaning(explain_oom(text), "neither free").meaning
    assert read_oom(text.replace("capacity", "capacty")).total == 80 * GiB  # as older versions had it
    rounded = read_oom(message(2 * GiB, 80 * GiB, 18 * GiB, 60 * GiB, 3 * GiB, process=62 * GiB, name=name))
    assert rounded.besides == rounded.elsewhere == 0  # never below
    text = text.replace(" of which 1024.00 MiB is free", "")
    assert read_oom(text).free is read_oom(text).elsewhere is None and len(explain_oom(text)) == 5


def test_the_exception_its_text_and_a_log_around_it_are_the_same_and_of_two_messages_the_first_is_read():
    rows = explain_oom(FULL)
    short = message(2 * GiB, 80 * GiB, GiB, 60 * GiB, GiB)
    second = message(4 * GiB, 16 * GiB, GiB, 2 * GiB, GiB, allowed=3 * GiB)
    for said in (
        torch.OutOfMemoryError(FULL),
        f"Traceback (most recent call last):\n  x = y\ntorch.OutOfMemoryError: {FULL}\nrank 3: died",
        re.sub(r"(\. |, )", r"\1\n   ", FULL),
        f"{FULL}\nstep 7: 60.00 GiB already allocated",
        f"{FULL}\n{rejection(GiB)}",
    ):
        assert explain_oom(said) == rows
    assert explain_oom(short + "\n" + second) == explain_oom(short)
    assert explain_oom(f"OutOfMemoryError: {rejection(2 * GiB)}\nTraceback …\n{FULL}") == explain_oom(
        rejection(2 * GiB)
    )


@pytest.mark.parametrize(
    ("free", "unallocated", "fragmented"),
    [
        (GiB, 3 * GiB, True),
        (GiB, GiB, True),
        (0, 2 * GiB, True),
        (GiB, GiB - 2 * MiB, True),  # asked for on behalf of up to 2 MiB less
        (GiB, GiB - 8 * MiB, False),
        (3 * GiB, 0, False),
    ],
)
def test_with_as_much_free_and_unallocated_as_was_asked_for_it_can_be_fragmentation(free, unallocated, fragmented):
    *others, row = explain_oom(oom_error(2 * GiB, 80 * GiB, free, 60 * GiB, unallocated))
    assert ("fragmentation" in row.meaning) == ("expandable_segments:True" in row.remedy) == fragmented
    assert ("too little" in row.meaning) == ("only fewer bytes" in row.remedy) == (not fragmented)
    assert "empty_cache() is no help" in row.remedy and not any("empty_cache" in other.remedy for other in others)


def expects(text, error=ValueError, words="expected PyTorch's message with …pass the whole text"):
    return lambda: explain_oom(text), error, words


OLDER = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.78 GiB total capacity; 14.20 GiB already allocated; "
    "323.75 MiB free; 14.41 GiB reserved in total by PyTorch)"
)


REFUSALS = {
    "nothing": expects(""),
    "part of it": expects(FULL.replace("Of the allocated memory", "Of it")),
    "a long number": expects("CUDA out of memory. Tried to allocate " + "9" * 6000 + " GiB."),
    "another error, and long": expects(RuntimeError("CUDA error: out of memory" * 1000)),
    "an older version's": expects(OLDER, words="PyTorch 2.1 or newer, found an older one"),
    "a rejection without its size": expects(
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed a limit.",
        words="which does not say what is asked",
    ),
    "bytes": expects(b"CUDA out of memory", TypeError, "expected an error or its text"),
}


@refusals(REFUSALS)
def test_foreign_text_is_refused_with_what_was_expected(call, error, words):
    refused(call, error, words)
    with pytest.raises(error) as raised:
        call()
    assert len(str(raised.value)) < 400


def oom_error(*figures):
    return torch.OutOfMemoryError(message(*figures))


@pytest.mark.parametrize(("asked", "least"), [(2 * MiB, 512), (20 * MiB, MiB + 11 * KiB)])
def test_a_shared_segment_was_asked_for_on_behalf_of_less_for_which_what_is_unallocated_must_do_alone(asked, least):
    assert read_oom(oom_error(asked, GiB, 0, 900 * MiB, least)).can_be_fragmented
    assert not read_oom(oom_error(asked, GiB, asked // 2, 900 * MiB, least // 2)).can_be_fragmented
    rows = explain_oom(oom_error(asked, GiB, asked // 2, 900 * MiB, 2 * MiB))
    assert "for a request of" in rows[0].meaning
    assert by_meaning(rows, "no process has it").remedy.endswith("too little for a segment, however small the request")
    assert "if the request was no larger" in rows[-1].meaning and "else hold fewer bytes" in rows[-1].remedy


def test_a_limit_of_the_programs_own_is_told_from_a_full_card():
    limited = message(2 * GiB, 80 * GiB, 40 * GiB, 38 * GiB, GiB, allowed=40 * GiB)
    assert "raise it" in by_meaning(explain_oom(limited), "own limit").remedy
    assert "the limit refused" in by_meaning(explain_oom(limited), "no process has it").remedy
    full = message(2 * GiB, 80 * GiB, GiB, 60 * GiB, GiB, allowed=79 * GiB)
    assert by_meaning(explain_oom(full), "own limit").remedy == "not what refused here"
    assert by_meaning(explain_oom(full), "no process has it").remedy == "it is 1.00 GiB too little"


def test_other_processes_are_named_where_they_hold_what_is_missing():
    rows = explain_oom(message(2 * GiB, 80 * GiB, GiB, 60 * GiB, GiB, process=62 * GiB))
    row = by_meaning(rows, "neither free nor this process's")
    assert row.nbytes == 17 * GiB and "nvidia-smi" in row.remedy
    rows = explain_oom(message(2 * GiB, 80 * GiB, GiB, 77 * GiB, GiB, process=78.5 * GiB))
    assert by_meaning(rows, "neither free nor this process's").remedy == ""
    assert by_meaning(rows, "that, less what PyTorch reserved").nbytes == GiB // 2


def test_a_driver_that_does_not_know_of_another_process_leaves_it_out():
    text = FULL.replace("Process 7 has 9.00 GiB", "Process 7 has 17179869184.00 GiB")
    assert read_oom(text).others == 5 * GiB
    assert read_oom(text).words["others"] == "Process 8 has 5.00 GiB memory in use."
    unknown = re.sub(r"has [\d.]+ GiB memory", "has 17179869184.00 GiB memory", FULL)
    assert read_oom(unknown).process is read_oom(unknown).others is None
    assert not any("17179869184" in row.words for row in explain_oom(unknown))


COLAB = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.75 GiB of which 13.06 MiB is "
    "free. Process 2365 has 14.73 GiB memory in use. Of the allocated memory 14.11 GiB is allocated by PyTorch, and "
    "476.97 MiB is reserved by PyTorch but unallocated."
)
CONTAINER = (2 * GiB, 48 * GiB, 1.5 * GiB, 24 * GiB, GiB)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (COLAB + TAIL, "Process 2365 has 14.73 GiB memory in use."),
        (message(*CONTAINER[:3], 45 * GiB, 0, others=[(9, 46 * GiB)]), "Process 9 has 46.00 GiB memory in use."),
    ],
    ids=["Colab", "round figures"],
)
def test_in_a_container_the_process_that_holds_what_pytorch_reserved_is_this_one(text, words):
    oom, rows = read_oom(text), explain_oom(text)
    assert oom.others is None and oom.words["process"] == words and 0 < oom.besides <= GiB
    row = by_meaning(rows, "most likely all that this process holds")
    assert (row.words, row.nbytes, row.remedy) == (words, oom.process, "")
    assert not any("end them" in row.remedy for row in rows)


@pytest.mark.parametrize("others", [[(7, 20 * GiB), (8, 26 * GiB)], [(8, 26 * GiB), (7, 20 * GiB)]])
def test_in_a_container_other_processes_are_told_from_this_one(others):
    oom = read_oom(message(*CONTAINER, others=others))
    assert (oom.process, oom.others, oom.besides) == (26 * GiB, 20 * GiB, GiB)
    assert oom.words["others"] == "Process 7 has 20.00 GiB memory in use."
    unknown = read_oom(message(*CONTAINER, others=[(6, 2**34 * GiB), *others]))
    assert (unknown.process, unknown.others) == (26 * GiB, 20 * GiB)


def rejection(asked, name="CUDA"):
    """What PyTorch 2.15 says with throw_on_cudamalloc_oom, by its binary: the text, then the size, and no full stop."""
    return (
        f"{name} out of memory. Allocation was preemptively rejected because it would exceed "
        f"per_process_memory_fraction limit. Requested size: {format_size(asked)}"
    )


@pytest.mark.parametrize("name", ["CUDA", "HIP"])
@pytest.mark.parametrize("asked", [512, 20 * MiB])
def test_a_request_that_was_rejected_at_once_tells_its_own_bytes_and_that_the_cache_is_still_full(asked, name):
    told = torch.OutOfMemoryError(rejection(asked, name))
    oom = read_oom(told)
    assert oom.rejected and oom.over_its_limit and not oom.can_be_fragmented and oom.asked == asked
    others = ("total", "allocated", "unallocated", "free", "process", "allowed", "private", "others")
    assert {getattr(oom, figure) for figure in (*others, "reserved", "besides", "elsewhere")} == {None}
    (row,) = explain_oom(told)
    assert row.words == f"Requested size: {format_size(asked)}" and row.nbytes == asked and row.level == "storages"
    assert "empty_cache(), which PyTorch did not do" in row.remedy and "segment" not in row.meaning
