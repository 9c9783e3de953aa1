"""The book's figures, tables, sources and benchmark say what the timeline says."""

import gc
import importlib
import json
import sys

import pytest
import torch

from memlab import benchmark
from memlab.book.allocator import allocated_peak
from memlab.book.figures import MOST_POINTS, bars, compare, plot
from memlab.book.source import show_source
from memlab.book.style import Picture, canvas, caption, is_sentence
from memlab.book.tables import Table, by_category, holders, storages
from memlab.book.workloads import GPT, text_batch
from memlab.memory_timeline import CATEGORIES, Event, Line, Meter, Storage, Timeline
from memlab.memory_timeline.storages import Storages
from memlab.units import GiB, MiB, format_bytes


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, context=16)
    x, y = text_batch(2, 16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with Meter(model, optimizer, inputs=(x, y)) as meter:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return meter.timeline


def long_timeline(events):
    """`events` events: one storage that is born and freed again and again, and at one moment twice as large."""
    line = Line("f", "x = y")
    blocks = [
        Storage(0, 100, "parameter", (25,), "float32", "cpu", "", "before", line, "", "w", "parameter w"),
        Storage(1, 1, "activation", (1,), "float32", "cpu", "add", "forward", line, "", "", "saved"),
    ]
    changes = [Event(0, 100, "", "before", line)]
    for number in range(events // 2):
        size = 1000 if number == events // 3 else 10
        changes += [Event(1, size, "add", "forward", line), Event(1, -size, "add", "forward", line)]
    return Timeline(blocks, changes)


def areas(picture):
    """The top edge of each stacked area at each drawn event, by its label's category."""
    return picture.figure.axes[0].collections


def test_a_plot_stacks_exactly_the_timelines_categories(step):
    picture = plot(step)
    axes = picture.figure.axes[0]
    drawn = {text.split("  ")[0] for text in axes.get_legend_handles_labels()[1]}
    assert drawn == {c.replace("_", " ") for c in CATEGORIES if any(step.curves[c])}
    scale = MiB if "MiB" in axes.get_ylabel() else 1024
    highest = max(path.vertices[:, 1].max() for area in areas(picture) for path in area.get_paths())
    assert highest * scale == pytest.approx(step.peak_bytes, rel=1e-9)


def test_a_plots_sentence_names_peak_phases_and_every_category_there(step):
    alt = plot(step, budget="1 MiB").alt
    assert format_bytes(step.peak_bytes) in alt and "forward, backward, optimizer" in alt and "1.0 MiB" in alt
    for category, nbytes in step.bytes_by_category(step.peak_event).items():
        assert (category.replace("_", " ") + " " in alt) == (nbytes > 0)


def test_a_plot_marks_the_peak_where_it_is(step):
    markers = [line for line in plot(step).figure.axes[0].lines if line.get_marker() == "v"]
    assert [line.get_xdata()[0] for line in markers] == [step.peak_event]


def test_a_long_timeline_is_thinned_without_losing_its_peak():
    timeline = long_timeline(20 * MOST_POINTS)
    figure = compare({"long": timeline}).figure
    x, y = figure.axes[0].lines[0].get_data()
    assert len(x) <= MOST_POINTS + 3 and max(y) == timeline.peak_bytes / 1024


def test_a_picture_shows_as_png_with_its_sentence_as_alt_text_and_as_text(step):
    data, metadata = plot(step)._repr_mimebundle_()
    assert data["text/plain"] == metadata["image/png"]["alt"] == plot(step).alt
    assert plot(step).png().startswith(b"\x89PNG")


def test_an_empty_timeline_can_be_plotted():
    with Meter() as meter:
        pass
    assert "0 events" in plot(meter.timeline).alt
    assert "0 B" in compare({"nothing": meter.timeline}).alt


@pytest.mark.parametrize("draw", [lambda t, b: plot(t, budget=b), lambda t, b: compare({"a": t}, budget=b)])
def test_a_budget_of_zero_is_refused_with_what_was_expected(step, draw):
    for zero in (0, "0 GiB"):
        with pytest.raises(ValueError, match="expected a budget of more than 0 bytes"):
            draw(step, zero)
    with pytest.raises(ValueError, match="expected a size"):
        draw(step, "sixteen")


def test_comparing_nothing_is_refused():
    with pytest.raises(ValueError, match="expected at least one timeline"):
        compare({})
    with pytest.raises(ValueError, match="expected at least one row"):
        bars({})


@pytest.mark.parametrize(
    ("timelines", "found"),
    [([Timeline()], "list"), (Timeline(), "Timeline"), (None, "NoneType"), ({"a": 1}, "int for 'a'")],
)
def test_what_is_no_dict_of_timelines_is_not_compared(timelines, found):
    with pytest.raises(TypeError, match=f"expected timelines as .*; found {found}$"):
        compare(timelines)


def test_bars_are_as_long_as_their_bytes_and_an_unknown_category_is_refused():
    picture = bars({"a": {"parameter": 3 * GiB, "gradient": GiB}, "b": {"parameter": GiB}}, budget="2 GiB")
    assert sorted(patch.get_width() for patch in picture.figure.axes[0].patches if patch.get_width()) == [1, 1, 3]
    assert "a: 4.0 GiB" in picture.alt and "2.0 GiB" in picture.alt
    with pytest.raises(ValueError, match="weights"):
        bars({"a": {"weights": 1}})


@pytest.mark.parametrize("alt", ["", "a plot", "<Figure size 640x480 with 1 Axes>"])
def test_a_picture_without_a_sentence_is_refused(alt):
    with pytest.raises(ValueError, match="expected a sentence that says what is in the picture"):
        Picture(canvas(3, 2)[0], alt)
    assert is_sentence("A line rises from 0 B to 4 KiB.")


def test_a_table_reads_the_same_as_text_and_as_markdown():
    table = Table(["name", "bytes"], [("a|b", 1234), ("c", 5)])
    assert "| 4.0\N{NO-BREAK SPACE}MiB |" in Table(["size"], [("4.0 MiB",)])._repr_markdown_()
    sentence = Table(["verdict"], [("holds if it is up to 4.0 MiB",)])._repr_markdown_()
    assert sentence.splitlines()[1:] == ["| :--- |", "| holds if it is up to 4.0 MiB |"]
    assert repr(table).splitlines() == ["name  bytes", "----  -----", "a|b   1,234", "c         5"]
    assert table._repr_markdown_().splitlines() == [
        "| name | bytes |",
        "| :--- | ---: |",
        "| a\\|b | 1,234 |",
        "| c | 5 |",
    ]


def test_a_tables_cells_are_text_unless_it_says_that_they_are_markdown():
    plain = ["optimizer_state", "(phases)", "a > b, d[0]", "a_b & c", "F.cross_entropy(x, y)"]
    for cell in plain:
        assert f"| {cell} |" in Table(["line"], [(cell,)])._repr_markdown_()
    for cell, spelt in [
        ("__init__", "\\_\\_init\\_\\_"),
        ("x**2", "x\\*\\*2"),
        ("a<b>c", "a&lt;b>c"),
        ("&lt;", "&amp;lt;"),
        ("$a", "<span>&#36;</span>a"),
        ('d["a"](x)', 'd["a"\\](x)'),
    ]:
        assert Table([cell], [(cell,)])._repr_markdown_() == f"| {spelt} |\n| :--- |\n| {spelt} |"
    assert "| [a](b) `c` |" in Table(["path"], [("[a](b) `c`",)], markdown=True)._repr_markdown_()


def test_a_caption_shows_names_as_they_are(monkeypatch):
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda data, **how: displayed.append(data))
    caption("The peak of *args is in __init__.")
    assert displayed == [
        {
            "text/markdown": "*The peak of \\*args is in \\_\\_init\\_\\_.*",
            "text/plain": "The peak of *args is in __init__.",
        }
    ]


def test_a_table_refuses_a_row_of_another_length():
    with pytest.raises(ValueError, match="expected 2 cells"):
        Table(["a", "b"], [(1,)])


def test_the_categories_table_sums_to_the_peak(step):
    *parts, total = by_category(step).rows
    assert total[2] == step.peak_bytes == sum(row[2] for row in parts)


@pytest.mark.parametrize("by", ["line", "reason", "module"])
def test_holders_account_for_every_storage_alive(step, by):
    rows = holders(step, by=by, top=3).rows
    assert sum(row[1] for row in rows) == len(step.alive(step.peak_event)) and len(rows) == 4
    with pytest.raises(ValueError, match="expected by="):
        holders(step, by="colour")


def test_storages_lists_the_largest_first(step):
    rows = storages(step, category="activation", top=4).rows
    largest = [s for s in step.alive(step.peak_event) if s.category == "activation"][:4]
    assert [row[0] for row in rows] == [format_bytes(s.nbytes) for s in largest]


def test_show_source_shows_what_stands_in_the_library():
    shown = show_source(Storages.note)
    assert "def note" in repr(shown) and shown._repr_markdown_().startswith("```python\n# memlab.memory_timeline")
    assert '"""' not in show_source(Storages.note, docstring=False).text
    with pytest.raises(TypeError, match="expected a function, class or module"):
        show_source(len)


@pytest.mark.parametrize("quoted", ["'''Ours.'''", '"Ours."', r'r"""Ours, \d."""', '"""Ours.\n\n    More.\n    """'])
def test_a_docstring_is_left_out_however_it_is_quoted_and_no_other_string_is(quoted, tmp_path, monkeypatch):
    (tmp_path / "quoted.py").write_text(
        f'def cut(sep="""-"""):\n    {quoted}\n\n    return sep + """+"""\n'
        "class Pair(__import__('typing').NamedTuple):\n    a: int\n\n    def b(self):\n        '''Mine.'''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "quoted", raising=False)
    quoted = importlib.import_module("quoted")
    assert show_source(quoted.cut, docstring=False).text == 'def cut(sep="""-"""):\n    return sep + """+"""'
    assert show_source(quoted.Pair, docstring=False).text == show_source(quoted.Pair).text


def test_the_allocators_peak_is_the_sum_of_what_was_held_at_once():
    def run():
        a = torch.empty(1000)
        b = torch.empty(500)
        del a
        c = torch.empty(250)
        del b, c

    assert allocated_peak(run) == 1500 * 4


def test_the_peak_on_a_card_may_be_asked_for_before_anything_else_is_wanted_of_cuda(monkeypatch):
    figures, started = {"current": 512, "peak": 4096}, []

    def statistics(device):
        assert device == "cuda"
        return {f"requested_bytes.all.{name}": nbytes for name, nbytes in figures.items()} if started else {}

    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(1))
    monkeypatch.setattr(torch.cuda, "memory_stats", statistics)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: figures.update(peak=figures["current"]))
    assert allocated_peak(lambda: figures.update(peak=1536), "cuda") == 1024


def test_garbage_that_happens_to_be_freed_meanwhile_hides_nothing_of_the_peak_on_a_card(monkeypatch):
    figures = {"current": 4096, "peak": 4096}

    class Model:
        """Part of a cycle, as a module with a wrapped `forward` is, and of 4096 bytes on the card."""

        def __init__(self):
            self.forward = self.__init__

        def __del__(self):
            figures["current"] -= 4096

    def run():
        gc.collect()
        figures["current"] += 1024
        figures["peak"] = max(figures["peak"], figures["current"])

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda device: {f"requested_bytes.all.{k}": n for k, n in figures.items()}
    )
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: figures.update(peak=figures["current"]))
    Model()
    assert allocated_peak(run, "cuda") == 1024


def benchmark_rows(capsys, *names):
    """What a quick benchmark of these measures prints."""
    threads = torch.get_num_threads()
    try:
        assert benchmark.main(["--quick", *names]) == 0
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out.splitlines()


def test_the_benchmark_finds_no_byte_between_meter_and_allocator_and_no_bit_between_scalers(capsys):
    printed = benchmark_rows(capsys, "meter_exactness", "loss_scaling", "accumulated_gradients")
    peaks = [line for line in printed if line.startswith("peak − an unmetered run's, ")]
    assert len(peaks) >= 5 and all(" +0 B of " in line for line in peaks), peaks
    scalers = [line for line in printed if line.startswith("LossScaler")]
    assert len(scalers) == 2, printed
    assert all("parameters bitwise, scale history equal through 1 overflows" in line for line in scalers), scalers


@pytest.mark.thorough
@pytest.mark.parametrize("name", [measure.__name__ for measure in benchmark.MEASURES[:-1]])  # the last: test_browser
def test_each_measure_runs(name, capsys):
    assert benchmark_rows(capsys, name)


def test_the_committed_lengths_are_whole_and_within_their_range():
    from memlab.book.workloads import lengths

    assert len(lengths()) == 1024 and all(16 <= n <= 4096 for n in lengths())
    assert json.dumps(list(lengths()))
