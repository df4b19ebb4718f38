"""The page of a plan: well formed, small, without requests, and its numbers are those of the data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest
from support.effort import every
from support.prose import ROOT
from support.report_pages import answer_of, page_of
from support.report_plans import CASES, plan_of, report_of, request_of, traced_of

import autopar
from autopar import api
from autopar.errors import AutoparError
from autopar.explaining.assumptions import assumption_rows
from autopar.explaining.certificate import certificate_rows
from autopar.explaining.found_plans import found_plans, why_lost
from autopar.explaining.gains import gain_words
from autopar.explaining.plan_report import choice_rows
from autopar.foreign.checking.report import check_data
from autopar.report.report import Report
from autopar.request.pins import Pins
from autopar.text.device_words import misfit_chance
from autopar.text.numbers import Numbers, plain
from autopar.text.plan_words import choice_words
from autopar.text.units import ms, percent

_VOID = {"meta", "link", "br", "img", "input", "hr"}
_KEYS = [
    "verdict",
    "plan",
    "run",
    "cluster",
    "timeline",
    "memory",
    "waterfall",
    "block",
    "certificate",
    "runners-up",
    "candidates",
    "pareto",
    "lints",
    "assumptions",
]


class Reader(HTMLParser):
    """What a page has: sections in order, numbers, requests, and tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: list[str] = []
        self.numbers: list[tuple[str, float, str]] = []
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.scripts = 0
        self._number: tuple[str, float] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        own = dict(attrs)
        if tag == "section":
            self.sections.append(own["id"])
        self.scripts += tag == "script"
        self.requests += [
            v
            for k, v in attrs
            if k in ("src", "href", "srcset", "xlink:href") and v[0] != "#" and v != "data:,"
        ]
        if "data-path" in own:
            self._number = own["data-path"], float(own["data-value"])
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """An element of SVG that is empty."""

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        if self._number is not None:
            self.numbers.append((*self._number, data))
            self._number = None


@pytest.mark.parametrize("case", CASES)
def test_a_page_is_well_formed_and_its_numbers_are_those_of_the_data(case):
    report = report_of(case)
    text = report.html()
    page = Reader(text)
    assert not page.faults and not page.open and not page.requests
    assert page.sections == [key for key in _KEYS if key in page.sections]
    assert {
        "verdict",
        "cluster",
        "timeline",
        "memory",
        "waterfall",
        "candidates",
        "assumptions",
    } <= set(page.sections)
    assert len(text.encode()) < 500_000
    assert "url(http" not in text and "@import" not in text
    data = json.loads(json.dumps(report.data))
    look = Numbers(data)
    assert len(page.numbers) > 60
    for path, value, shown in page.numbers:
        assert value == look.value(path), path
        assert re.search(r"\d", shown), f"{path} is shown as {shown!r}"


@pytest.mark.slow
def test_the_page_has_the_runners_up_of_the_text_and_the_chance_that_it_does_not_fit():
    case = "no pipeline"
    request = replace(request_of(case), pin=Pins(), runners_up=True)
    plan = api.plan_traced(traced_of(CASES[case][0]), request, time_limit_s=20.0)
    report = Report(plan, request.cluster)
    page = Reader(report.html())
    assert page.sections.index("runners-up") + 1 == page.sections.index("candidates")
    shown = {(path, text): value for path, value, text in page.numbers}
    found = [k for k, entry in enumerate(plan.certificate.runners_up) if entry["time_s"]]
    assert len(found) > 1
    for k in found:
        own_s = plan.certificate.runners_up[k]["time_s"]
        assert shown[f"certificate.runners_up.{k}.time_s", ms(own_s)] == own_s
        assert ms(own_s) in str(report)
    chance = misfit_chance(plan, request.cluster)
    assert chance is not None and shown["report.misfit_chance", percent(chance)] == chance
    plans = found_plans(plan)
    assert sum(other.is_chosen for other in plans) == 1 and len(plans) > len(found)
    assert f"it found {len(plans)} plans" in report.html()
    figure = next(figure for figure in report.svgs() if figure.name == "pareto").inline()
    for other in plans:
        is_drawn = other.entry["time_s"] <= 4 * plan.predicted.step_time_s
        assert (f"{other.path}.time_s" in {path for path, _ in shown}) >= is_drawn
        assert (choice_words(other.entry) in figure) >= is_drawn
        if not other.is_chosen:
            assert why_lost(plan, other.entry) in unescape(report.html())


@pytest.mark.parametrize("case", ["1f1b", "ZeRO-3"])
def test_text_and_page_have_the_same_facts(case):
    """What is proved, under which pins, what other software saves, what to copy, and the rates."""
    report = replace(report_of(case), command="autopar explain MODEL CLUSTER")
    numbers = Numbers(report.data)
    facts = [plain(words) for _, words in certificate_rows(report.plan, report.cluster, numbers)]
    facts += [value for _, value in choice_rows(report.plan, report.cluster)]
    facts += [plain(gain_words(numbers, place)) for place in range(len(report.gains))]
    facts += [plain(row[1]) for row in assumption_rows(numbers)]
    facts += ["autopar explain MODEL CLUSTER", "--save"]
    assert report.gains and "among plans with" in facts[0]
    for text in (str(report), unescape(re.sub(r"<[^>]*>", "", report.html()))):
        shown = " ".join(text.split())
        assert [fact for fact in facts if " ".join(fact.split()) not in shown] == []
    page = " ".join(unescape(re.sub(r"<[^>]*>", "", report.html())).split())
    words_of_text = set(str(report).split())  # a terminal breaks the lines of its cells
    for words in (words for rule in report.plan.certificate.rules for words in rule.values()):
        assert words in page and set(words.split()) <= words_of_text
    is_gathered = "all-gather over dp in forward" in report.html()
    assert is_gathered == (case == "ZeRO-3")


@pytest.mark.parametrize(
    "name", every(2, ["a job that does not fit", "a refused job", "compare", "sweep"])
)
def test_pages_of_jobs_and_questions(name):
    """Well formed, without requests, and every number is in the data."""
    text = page_of(name).html()
    page, look = Reader(text), Numbers(json.loads(json.dumps(page_of(name).data)))
    assert not page.faults and not page.open and not page.requests
    for path, value, shown in page.numbers:
        assert value == look.value(path), path
        assert re.search(r"\d", shown)


def test_the_page_of_a_job_has_its_answer_and_its_step():
    answer, page = answer_of("a job that does not fit"), page_of("a job that does not fit")
    assert not answer.fits and answer.changes and answer.gap is not None
    keys = [section.key for section in page.sections]
    assert keys[:3] == ["verdict", "better", "changes"]
    assert {"ranks", "cluster", "timeline", "memory", "waterfall"} <= set(keys)
    assert page.data | {"plan": None} == check_data(answer) | {"plan": None}
    ranks = page.data["plan"]["report"]["ranks"]
    assert [rank["peak_bytes"] for rank in ranks] == list(answer.plan.predicted.peak_memory_bytes)
    assert {rank["limit_bytes"] for rank in ranks} == {answer.cluster.device.memory_bytes}
    assert page_of("a refused job").sections[1].key == "findings-refused"


def test_what_is_shown_is_the_number_rounded():
    """The text of a number is its value, to the digits that it has, in the unit that it names."""
    units = {
        "ms": 1e-3,
        "s": 1.0,
        "GiB": 2**30,
        "%": 1e-2,
        "GB/s": 1e9,
        "TFLOP/s": 1e12,
        "us": 1e-6,
        "": 1.0,
    }
    for case in ("1f1b", "experts"):
        for path, value, shown in Reader(report_of(case).html()).numbers:
            number, unit = re.fullmatch(r"(-?[\d,.]+(?:e[-+]?\d+)?) ?(\S*)", shown.strip()).groups()
            read = float(number.replace(",", "")) * units[unit]
            digits = len(number.partition(".")[2]) if "e" not in number else 3
            assert abs(read - value) <= max(
                0.51 * 10**-digits * units[unit], 0.06 * abs(value) * ("e" in number)
            ), (path, shown)


def test_script_and_plan_without_a_model():
    script = (ROOT / "autopar/report/templates/report.js").read_text()
    assert len(script.splitlines()) <= 200
    plan = plan_of("1f1b")
    bare = autopar.explain(plan)
    page = Reader(bare.html())
    assert "timeline" not in page.sections and "memory" in page.sections and not page.faults
    assert "tp=2" in bare and str(bare).startswith(plan.model_name)
    assert "<iframe" in bare._repr_html_()
    with pytest.raises(AutoparError, match="a trace needs the model"):
        bare.save_trace("trace.json")


def test_files_are_written(tmp_path):
    report = report_of("1f1b")
    report.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == report.html()
    with pytest.raises(AutoparError, match=r"ends in \.html"):
        report.save(tmp_path / "report.txt")
    paths = report.save_svgs(tmp_path / "figures")
    assert {p.stem for p in paths} >= {"cluster", "timeline", "memory", "waterfall", "block"}
    for path in paths:
        text = path.read_text()
        assert text.startswith("<svg xmlns") and "prefers-color-scheme" in text
        from xml.etree import ElementTree

        ElementTree.fromstring(text)


def test_a_plan_prints_in_five_lines():
    for case in CASES:
        lines = repr(plan_of(case)).splitlines()
        assert len(lines) == 5 and all(len(line) <= 120 for line in lines), lines
