"""The slab, a layout, files and the footprint of a view: where bytes are elsewhere, and which they are."""

import errno
import mmap
import os
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.memory_timeline import Meter
from memlab.offloading.footprint import footprint, needed, shape_in
from memlab.offloading.layout import flat_bytes, laid_out, views_of
from memlab.offloading.slab import ALIGNMENT, Gaps, Slab
from memlab.offloading.unnamed import UnnamedFile
from memlab.units import MiB
from tests.harness import refused


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 400), st.integers(0, 100)), max_size=60))
def test_what_gaps_hand_out_never_overlaps_and_all_given_back_is_one_gap(steps):
    gaps, taken = Gaps(2048), []
    for take, nbytes, which in steps:
        if take or not taken:
            start = gaps.take(nbytes)
            if start is None:
                assert all(gap < nbytes for _, gap in gaps.free)
            else:
                taken.append((start, nbytes))
        else:
            gaps.give(*taken.pop(which % len(taken)))
        cells = [cell for start, n in taken for cell in range(start // ALIGNMENT, -(-(start + n) // ALIGNMENT))]
        assert len(set(cells)) == len(cells)
        assert gaps.taken_bytes == ALIGNMENT * len(cells) == 2048 - sum(gap for _, gap in gaps.free)
    for piece in taken:
        gaps.give(*piece)
    assert gaps.free == [(0, 2048)]


def test_a_slab_is_allocated_once_and_its_pieces_are_aligned_views_of_it():
    slab = Slab(1024)
    assert slab.allocated_bytes == 0
    with Meter() as meter:
        rooms = [slab.take(n) for n in (100, 200, 300)]
        slab.give(rooms[1])
        again = slab.take(128)
    assert meter.timeline.peak_bytes == slab.allocated_bytes == 1024
    assert all(room.bytes.data_ptr() % ALIGNMENT == 0 for room in rooms)
    assert again.start == rooms[1].start and slab.taken_bytes == 128 + 128 + 320


def test_a_slab_of_fixed_size_says_when_it_is_full_and_one_that_grows_adds_chunks_of_powers_of_two():
    slab = Slab(256)
    assert slab.take(300) is None and slab.take(200) and slab.take(100) is None
    growing = Slab()
    growing.CHUNK_BYTES = 1024
    sizes = [growing.take(n) and growing.allocated_bytes for n in (1000, 100, 3000, 500)]
    assert sizes == [1024, 2048, 2048 + 4096, 2048 + 4096]


def test_without_pinned_memory_there_is_one_warning_and_ordinary_memory(monkeypatch):
    def none_left(*size, pin_memory=False, _empty=torch.empty, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return _empty(*size, **options)

    monkeypatch.setattr(torch, "empty", none_left)
    slab = Slab(pinned=True)
    slab.CHUNK_BYTES = 1024
    with pytest.warns(UserWarning, match="expected 1.0 KiB of pinned memory, found none .CUDA error: out of memory."):
        room = slab.take(1000)
    assert slab.take(1000).bytes.numel() == room.bytes.numel() == 1000  # no second warning: it would be an error


def test_tensors_side_by_side_are_aligned_keep_dense_strides_and_stay_within_their_bytes():
    tensors = [
        torch.randn(3),
        torch.randn(2, 3).bfloat16().t(),
        torch.randn(8, 4, dtype=torch.float64)[:, :2],
        torch.zeros(0),
        torch.tensor(True),
    ]
    nbytes = flat_bytes(tensors)
    assert nbytes == laid_out(tensors)[1] == 64 + 64 + 128 + 64
    memory = torch.full((64 + nbytes + 64,), 77, dtype=torch.uint8)
    views = views_of(memory[64:-64], tensors)
    assert [v.shape for v in views] == [t.shape for t in tensors]
    assert [v.stride() for v in views] == [(1,), (1, 3), (2, 1), (1,), ()]
    assert [v.storage_offset() * v.element_size() - 64 for v in views] == [0, 64, 128, 256, 256]
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    again = views_of(memory[64:-64].clone(), tensors)
    assert all(torch.equal(view, tensor) for view, tensor in zip(again, tensors, strict=True))
    assert (memory[:64] == 77).all() and (memory[-64:] == 77).all()


class Slow:
    """Moves a thousand bytes a call at the most, as a system may."""

    def __init__(self, raw):
        self.raw = raw

    def write(self, view):
        return self.raw.write(view[:1000])

    def readinto(self, view):
        return self.raw.readinto(view[:1000])

    def __getattr__(self, name):
        return getattr(self.raw, name)


@pytest.fixture(params=[lambda raw: raw, Slow], ids=["whole", "in parts"])
def unnamed(request, tmp_path):
    file = UnnamedFile(tmp_path)
    file.raw = request.param(file.raw)
    yield file
    assert os.listdir(tmp_path) == []
    file.close()
    assert file.raw.closed


@pytest.mark.parametrize("promised", [True, False])
def test_a_reserved_file_has_room_on_the_disk_and_what_was_written_stays(unnamed, monkeypatch, promised):
    if not promised:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    before, after = torch.randn(1000), torch.empty(1000)
    unnamed.reserve(5000)
    unnamed.write(16, before)
    for nbytes in (3 * MiB + 5, 100):  # the second has its room already
        unnamed.reserve(nbytes)
        found = os.fstat(unnamed.raw.fileno())
        assert found.st_size == unnamed.reserved_bytes == 3 * MiB + 5 <= found.st_blocks * 512
    unnamed.read(16, after)
    assert torch.equal(before, after)


@pytest.mark.parametrize("make", [lambda x: x, torch.t, lambda x: x[0, :7].bfloat16(), lambda x: x[:0]])
def test_a_dense_tensors_bytes_are_written_and_read_whole(unnamed, make):
    tensor = make(torch.randn(40, 30))
    into = torch.empty_like(tensor)
    unnamed.write(123, tensor)
    unnamed.read(123, into)
    assert torch.equal(into, tensor) and into.stride() == tensor.stride()
    into.untyped_storage().resize_(0)  # nothing holds it


def test_a_window_on_the_file_outlives_it_and_shows_what_is_written(unnamed):
    unnamed.reserve(4096)
    window = unnamed.mapped(0, 4096)
    unnamed.write(8, torch.arange(4, dtype=torch.uint8))
    window[0] = 9
    into = torch.empty(12, dtype=torch.uint8)
    unnamed.read(0, into)
    assert into.tolist() == [9, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3] == list(window[:12])
    unnamed.close()
    assert window[0] == 9
    window.close()


def test_all_that_fails_in_a_file_names_the_folder_the_bytes_and_what_to_do(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def too_many(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    file = UnnamedFile(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    monkeypatch.setattr(mmap, "mmap", full)
    monkeypatch.setattr(tempfile, "TemporaryFile", too_many)
    room = "free some space there, or name another folder"
    for call, wanted, found, advice in (
        (lambda: file.reserve(2048), "find room for 2.0 KiB", "No space left on device", room),
        (lambda: file.mapped(0, 1024), "map 1.0 KiB", "No space left on device", room),
        (lambda: file.read(0, torch.empty(3)), "read 12 B", "the file ended early", room),
        (lambda: UnnamedFile(tmp_path), "make a file", "Too many open files", "…ulimit -n"),
    ):
        refused(call, OSError, f"expected to {wanted} in folder '{tmp_path}', found: {found}; {advice}")
    assert file.reserved_bytes == 0
    file.close()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def copied(tensor: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
    """What comes back if a tensor leaves: it, or another that it covers."""
    sent = footprint(tensor)
    memory = torch.full((-(-sent.nbytes // 16) * 16,), 255, dtype=torch.uint8)
    source = needed(tensor, sent)
    assert source.numel() * source.element_size() == sent.nbytes
    memory[: sent.nbytes].view(tensor.dtype).view(source.shape).copy_(source)
    return shape_in(tensor if wanted is None else wanted, sent).of(memory)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]


@st.composite
def views(draw) -> torch.Tensor:
    """Any view of one storage: cut, stepped, permuted, expanded, overlapping, of another dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    base = torch.arange(96 * 16, dtype=torch.int32).to(torch.uint8)
    base = (base % 2 if dtype is torch.bool else base).view(dtype)
    size = draw(st.lists(st.integers(1, 5), max_size=4))
    stride = [draw(st.integers(0, 20)) for _ in size]
    span = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return base.as_strided(size, stride, draw(st.integers(0, base.numel() - 1 - span))) if span < base.numel() else base


@settings(deadline=None, max_examples=200, derandomize=True)
@given(views())
def test_any_view_comes_back_with_its_values_and_sends_no_more_than_it_must(view):
    back = copied(view)
    assert back.dtype == view.dtype and back.shape == view.shape
    assert torch.equal(bits(back), bits(view))
    sent = footprint(view)
    places = torch.arange(view.untyped_storage().nbytes() // view.element_size())
    distinct = places.as_strided(view.shape, view.stride(), view.storage_offset()).unique().numel()
    assert sent.nbytes <= max(distinct * view.element_size(), sent.end - sent.start // 64 * 64)
    assert sent.nbytes >= distinct * view.element_size()
    if not sent.holes:
        assert all(n == 1 or a == b for n, a, b in zip(view.shape, back.stride(), view.stride(), strict=True))
        assert back.storage_offset() * back.element_size() % 64 == view.storage_offset() * view.element_size() % 64


@settings(deadline=None, max_examples=200, derandomize=True)
@given(views(), views())
def test_a_footprint_that_covers_another_has_its_bytes(one, other):
    sent = footprint(one)
    if one.dtype == other.dtype and sent.covers(footprint(other)):
        assert torch.equal(bits(copied(one, other)), bits(other))


@pytest.mark.parametrize(
    "make, nbytes",
    [
        (lambda: torch.zeros(8, 4), 128),
        (lambda: torch.zeros(1024).expand(4, 1024), 4096),  # 16 KiB of elements, 4 KiB of bytes
        (lambda: torch.zeros(8, 64).unflatten(1, (4, 16))[:, 1], 8 * 16 * 4),  # a quarter of each row
        (lambda: torch.zeros(1000)[999], 32),  # from byte 3968 = 62 · 64 on, up to its last, 3999
        (lambda: torch.zeros(200).as_strided((50, 50), (2, 2)), 788),  # 2500 elements at 99 places, with holes
    ],
)
def test_the_bytes_that_a_view_needs(make, nbytes):
    assert footprint(make()).nbytes == nbytes


def test_a_transpose_shares_the_copy_of_what_has_holes_and_other_dtypes_that_of_what_has_none():
    fused = torch.zeros(8, 3, 16)
    q = footprint(fused[:, 0])
    assert q.holes and q.covers(footprint(fused[:, 0].t())) and q.covers(footprint(fused[:, 0].unsqueeze(0)))
    assert not q.covers(footprint(fused[:, 1])) and not q.covers(footprint(fused[:, 0].view(torch.int16)))
    assert footprint(fused).covers(footprint(fused.view(torch.int16)[3:]))
