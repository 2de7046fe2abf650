"""The pure parts of the benchmarks: figures, tables, the page and the plot. What they measure is measured elsewhere."""

from __future__ import annotations

import io
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import gpu_parts
import page
import plot
import report
import run
from bench import Bench, PerRound
from in_process import Chain
from invivo import Local
from invivo.tracer.outer import OuterTrace
from measure import Curve, Figure, alternate, around, beside, less, machine, over
from parts import PARTS, Part
from payloads import Sink
from worker import Worker

ROOT = Path(__file__).resolve().parents[2]


def figure(
    values: list[float], bar: float | None = None, *, least: bool = False, name: str = "read one layer"
) -> Figure:
    return Figure(name, "x", values, bar, "it was measured", "what there is", least)


def section(*figures: Figure, curves: tuple[Curve, ...] = (), quick: bool = False) -> report.Section:
    machine = {"cpu": "one", "load before": "0.1"}
    return report.Section("traced decoding", machine, 60.0, quick, list(figures), list(curves))


CURVE = Curve("read one layer", "x", "concurrent traces", {16: [0.9, 0.8, 0.7], 1: [1.0]}, "as above")
SECTIONS = {
    "decode": section(
        figure([0.96, 0.98, 0.97], 0.97, least=True, name="read one layer"),
        figure([0.5, 0.6, 0.7], 0.9, least=True, name="save 30 layers"),
        figure([3.0], None, name="watched"),
    ),
    "growth": section(curves=(CURVE,)),
}


class TestFigures:
    def test_median_and_spread(self) -> None:
        assert figure([3.0, 1.0, 2.0]).median == 2.0
        assert figure([1.0, 2.0, 3.0]).spread == (1.0, 3.0)
        assert figure([5.0]).spread == (5.0, 5.0)

    @pytest.mark.parametrize(
        ("median", "bar", "least", "met"),
        [
            (1.0, None, False, None),
            *((1.0, 1.0, False, True), (1.1, 1.0, False, False), (0.9, 1.0, False, True)),
            *((1.0, 1.0, True, True), (1.1, 1.0, True, True), (0.99, 1.0, True, False)),
        ],
    )
    def test_a_bar_is_a_most_or_a_least(self, median: float, bar: float | None, least: bool, met: bool | None) -> None:
        assert figure([median], bar, least=least).met is met

    def test_ratios_and_differences_are_within_rounds(self) -> None:
        assert over([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
        assert less([2.0, 9.0], [1.0, 3.0]) == [1.0, 6.0]
        with pytest.raises(ValueError, match="longer"):
            over([1.0], [1.0, 2.0])

    def test_every_other_round_goes_backwards_and_warm_ones_do_not_count(self) -> None:
        called: list[str] = []

        def taking(name: str) -> float:
            called.append(name)
            return float(len(called))

        watched: list[tuple[str, int, int]] = []
        measured = alternate(
            {name: lambda name=name: taking(name) for name in "ab"},  # type: ignore[misc]
            2,
            warm=1,
            watch=lambda *told: watched.append(told),
        )
        assert "".join(called) == "ba" + "ab" + "ba"
        assert measured == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
        assert watched[0] == ("b, to warm up", 0, 2)
        assert watched[-1] == ("a", 1, 2)

    def test_a_round_has_one_set_of_prompts_and_the_next_another(self) -> None:
        bench = Bench(False, lambda *_: None)
        prompts = PerRound(lambda: bench.prompts(2, 3), 2)
        first, again, second = prompts.take(), prompts.take(), prompts.take()
        assert first is again
        assert first != second
        assert [len(prompt) for prompt in first] == [3, 3]

    def test_a_quick_run_is_short(self) -> None:
        quick, whole = Bench(True, lambda *_: None), Bench(False, lambda *_: None)
        assert (quick.rounds(16), quick.rounds(4), quick.tokens(64)) == (2, 2, 8)
        assert (whole.rounds(16), whole.tokens(64)) == (16, 64)

    def test_the_machine(self) -> None:
        assert {"cpu", "cores", "load before", "torch", "vllm", "invivo"} <= set(machine())


class TestReport:
    def test_json_holds_everything(self, tmp_path: Path) -> None:
        path = tmp_path / "results.json"
        path.write_bytes(report.encode(SECTIONS))
        assert report.read(path) == {**SECTIONS}
        entries = msgspec.json.decode(path.read_bytes())["decode"]["figures"]
        assert [entry["met"] for entry in entries] == [True, False, None]
        assert entries[0]["median"] == 0.97

    def test_counts_keep_all_digits(self, tmp_path: Path) -> None:
        figures = [Figure("bytes", "bytes", [327680.0, 0.123456], 327680, "they were counted")]
        path = tmp_path / "results.json"
        path.write_bytes(report.encode({"ranks": msgspec.structs.replace(SECTIONS["decode"], figures=figures)}))
        assert report.read(path)["ranks"].figures[0].values == [327680.0, 0.1235]

    def test_what_cannot_be_read_is_measured_anew(self, tmp_path: Path) -> None:
        assert report.read(tmp_path / "none.json") == {}
        (tmp_path / "old.json").write_text('{"machine": {}, "figures": []}')
        assert report.read(tmp_path / "old.json") == {}

    def test_a_missed_bar_is_shown_as_missed(self) -> None:
        made = report.markdown(SECTIONS, how=False)
        assert "| read one layer | 0.97 x | 0.96 to 0.98 | at least 0.97 x | yes | 3 |" in made
        assert "| save 30 layers | 0.6 x | 0.5 to 0.7 | at least 0.9 x | **no** | 3 |" in made
        assert "| watched | 3 x |  |  |  | 1 |" in made
        assert report.summary(SECTIONS) == "1 of 2 bars are met. Missed: save 30 layers (0.6 x, at least 0.9 x)."

    def test_growth_is_a_table_of_its_own(self) -> None:
        made = report.markdown(SECTIONS, how=False)
        assert "| concurrent traces | 1 | 16 |\n|---|---|---|\n| read one layer | 1 x | 0.8 x |" in made

    def test_how_it_was_measured_is_said_where_it_is_asked_for(self) -> None:
        assert "- **read one layer**: Limited by what there is." in report.markdown(SECTIONS, how=False)
        assert "- **read one layer**: it was measured. Limited by what there is." in report.markdown(SECTIONS, how=True)

    def test_a_quick_run_says_that_it_was(self) -> None:
        assert report.QUICK in report.markdown({"decode": section(quick=True)}, how=True)
        assert report.QUICK not in report.markdown(SECTIONS, how=True)

    def test_machines_that_differ_are_all_named(self) -> None:
        other = msgspec.structs.replace(SECTIONS["growth"], machine={"cpu": "one", "load before": "2.5"})
        made = report.machines({**SECTIONS, "growth": other})
        assert "- cpu: one\n- load before: 0.1, 2.5\n- time that it took: 2.0 minutes\n" in made

    def test_tables_for_a_terminal(self) -> None:
        assert [table.row_count for part in SECTIONS.values() for table in report.tables(part)] == [3, 1]


class TestPage:
    TEXT = "a\n<!-- measured: one -->\nold\n<!-- end -->\nb\n<!-- measured: two -->\n<!-- end -->\n"

    def test_only_what_is_measured_is_replaced(self) -> None:
        made = page.filled(self.TEXT, {"one": "new\n", "two": r"\1"})
        assert re.sub(r"\n+", "\n", made) == self.TEXT.replace("old", "new").replace("two -->\n", "two -->\n\\1\n")
        assert page.filled(made, {"one": "new\n", "two": r"\1"}) == made

    def test_a_page_without_the_parts_is_refused(self) -> None:
        with pytest.raises(ValueError, match="two"):
            page.filled(self.TEXT, {"one": ""})

    def test_the_page_of_the_repository_has_the_parts(self) -> None:
        text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
        made = page.filled(text, page.parts(SECTIONS))
        assert "1 of 2 bars are met" in made
        assert "- **read one layer**, by concurrent traces: as above." in made

    def test_page_table_and_json_of_the_repository_belong_together(self) -> None:
        """`run.py --render` would change nothing."""
        sections = report.read(ROOT / "benchmarks" / "results" / "results.json")
        assert list(sections) == [name for name in PARTS if name in sections]
        text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
        assert page.filled(text, page.parts(sections)) == text

    def test_those_of_the_gpu_belong_together(self) -> None:
        sections = report.read(ROOT / "benchmarks" / "results" / "gpu.json")
        text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
        assert list(sections) == list(gpu_parts.PARTS)
        assert page.filled(text, page.parts(sections), "measured-gpu") == text


class TestRun:
    @pytest.fixture
    def console(self) -> Console:
        return Console(file=io.StringIO(), width=100)

    def test_a_part_that_fails_is_shown_and_the_others_are_measured(
        self, monkeypatch: pytest.MonkeyPatch, console: Console
    ) -> None:
        closed: list[str] = []

        def fails(bench: Bench) -> list[Figure | Curve]:
            bench.watch("failing", 0, 1)
            raise OSError("no such engine")

        def works(bench: Bench) -> list[Figure | Curve]:
            bench._started.append(lambda: closed.append("engine"))
            return [figure([1.0]), CURVE]

        monkeypatch.setattr(run, "PARTS", {"fails": Part("what fails", fails), "works": Part("what works", works)})
        measured, failed = run._measure(console, ["fails", "works"], quick=True)
        assert failed
        assert list(measured) == ["works"]
        assert measured["works"].figures == [figure([1.0])]
        assert measured["works"].curves == [CURVE]
        assert measured["works"].quick
        assert closed == ["engine"]
        assert isinstance(console.file, io.StringIO)
        assert "fails could not be measured" in console.file.getvalue()
        assert "no such engine" in console.file.getvalue()

    def test_everything_that_is_written_says_the_same(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name, file in (("JSON", "a/r.json"), ("TABLE", "a/r.md"), ("PAGE", "page.md"), ("PLOT", "p.svg")):
            monkeypatch.setattr(run, name, tmp_path / file)
        page_of_the_repository = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
        (tmp_path / "page.md").write_text(page_of_the_repository, encoding="utf-8")
        run._write({"decode": section(figure([0.98349, 0.98349], 0.97, least=True))})
        (read,) = report.read(tmp_path / "a" / "r.json").values()
        row = f"| {' | '.join(report.cells(read.figures[0]))} |"
        assert row in (tmp_path / "a" / "r.md").read_text(encoding="utf-8")
        assert row in (tmp_path / "page.md").read_text(encoding="utf-8")
        assert (tmp_path / "p.svg").exists()

    def test_parts_are_chosen_by_name(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["run.py", "--only", "decode", "single"])
        assert run._options().only == ["decode", "single"]
        monkeypatch.setattr(sys, "argv", ["run.py", "--only", "decoding"])
        with pytest.raises(SystemExit):
            run._options()
        assert "invalid choice" in capsys.readouterr().err


class TestWithoutAnEngine:
    def test_blocks_of_several_requests_run_on_a_hub(self) -> None:
        chain = Worker(3)
        assert all(chain.cpu(payload, 2) > 0 for payload in (None, chain.walk, chain.read, chain.edit))

    def test_what_a_sink_was_given(self) -> None:
        model, sink = Local(Chain(2)), Sink()
        with OuterTrace(model, sink, lambda prompt, sampling: (None, 0), {}) as tracer:
            for _ in range(3):
                with tracer.invoke(None):
                    model.units[0].output  # type: ignore[attr-defined]
        assert len(sink.encoded) == 3
        assert 0 < max(map(len, sink.encoded)) < 2048


class TestPlot:
    def test_the_same_figures_give_the_same_picture(self, tmp_path: Path) -> None:
        for name in ("one.svg", "two.svg"):
            plot.draw(tmp_path / name, SECTIONS)
        assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
        words = " ".join(ET.fromstring((tmp_path / "one.svg").read_text(encoding="utf-8")).itertext())
        assert "read one layer" in words
        assert "concurrent traces" in words

    def test_nothing_measured(self, tmp_path: Path) -> None:
        plot.draw(tmp_path / "none.svg", {})
        assert (tmp_path / "none.svg").stat().st_size > 0


def test_each_is_compared_with_what_ran_before_and_after_it() -> None:
    clock = iter(range(1, 100))
    ran: list[str] = []

    def measured(name: str) -> float:
        ran.append(name)
        return float(next(clock))

    others = {name: lambda name=name: measured(name) for name in ("one", "two")}
    times = alternate(around("base", lambda: measured("base"), others), rounds=2, warm=0)
    assert ran == ["base", "one", "base", "two", "base", "base", "two", "base", "one", "base"]
    assert times["one"] == [2.0, 9.0] and times["two"] == [4.0, 7.0]
    assert beside(times, "base", others) == {"one": [2.0, 9.0], "two": [4.0, 7.0]}
