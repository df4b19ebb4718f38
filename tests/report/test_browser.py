"""The page in a browser: opens fast, says and asks for nothing, cuts nothing, wide and narrow, light and
dark.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest
from support.report_pages import JOBS, QUESTIONS, page_of
from support.report_plans import report_of

from autopar.cli.session import Asked, Planner
from autopar.report.page import Page
from autopar.text.numbers import Numbers

_BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        _BROWSER is None, reason="no Chromium on this machine (apt-get install chromium)"
    ),
]
_PROBE = """
<script>
window.problems = [];
addEventListener("error", event => window.problems.push("error: " + event.message));
for (const kind of ["log", "warn", "error"]) console[kind] = text => window.problems.push(kind + ": " + text);
addEventListener("load", () => {
  const found = {problems: window.problems, requests: performance.getEntriesByType("resource").map(one => one.name)};
  found.ready = performance.now();
  found.wide = document.documentElement.scrollWidth - innerWidth;
  found.numbers = [...document.querySelectorAll("[data-path]")].map(one => [one.dataset.path, one.dataset.value]);
  const cut = [], seen = [];
  for (const one of document.querySelectorAll("svg text")) {
    const box = one.getBoundingClientRect(), svg = one.ownerSVGElement.getBoundingClientRect();
    if (box.left < svg.left - 1 || box.right > svg.right + 1 || box.bottom > svg.bottom + 1) cut.push(one.textContent);
    for (const other of seen) {
      if (other.svg === one.ownerSVGElement && box.left < other.box.right - 1 && other.box.left < box.right - 1 &&
          box.top < other.box.bottom - 2 && other.box.top < box.bottom - 2) cut.push(one.textContent + " over " + other.text);
    }
    seen.push({svg: one.ownerSVGElement, box: box, text: one.textContent});
  }
  for (const one of document.querySelectorAll("main *, body > *")) {
    const style = getComputedStyle(one);
    if (style.overflowX !== "visible" && style.overflowX !== "auto" && style.overflowX !== "scroll" &&
        one.scrollWidth > one.clientWidth + 1 && one.clientWidth) cut.push(one.tagName + " " + one.textContent.slice(0, 40));
  }
  found.cut = cut;
  const out = document.createElement("script");
  out.type = "application/json"; out.id = "found"; out.textContent = JSON.stringify(found);
  parent.document.body.append(out);
});
</script>
"""


def opened(text: str, folder: Path, width: int, dark: bool = False) -> dict:
    """What a page with this HTML says of itself in a window of this width. A headless window is at
    least 500 wide, so that the page is in a frame.
    """
    inner = escape(text.replace("<head>", f"<head>{_PROBE}"))
    page = folder / "report.html"
    page.write_text(
        f'<!doctype html><body style="margin:0"><iframe style="border:0;width:{width}px;height:900px" srcdoc="{inner}"></iframe>'
    )
    flags = ["--force-dark-mode"] if dark else []
    done = subprocess.run(
        [str(_BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={max(width, 500)},900", *flags,
         f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, env=os.environ | {"HOME": str(folder)},
    )  # fmt: skip
    found = re.search(
        r'<script type="application/json" id="found">(.*?)</script>', done.stdout, re.S
    )
    assert found, done.stderr[-2000:]
    return json.loads(found[1])


def check(page: Page, folder: Path, width: int, dark: bool = False) -> None:
    text = page.html()
    assert len(text.encode()) < 500_000
    found = opened(text, folder, width, dark)
    assert found["problems"] == [] and found["requests"] == []
    tries = [found["ready"]]
    while min(tries) >= 2000 and len(tries) < 3:  # others may use this machine
        tries.append(opened(text, folder, width, dark)["ready"])
    assert min(tries) < 2000
    assert found["wide"] <= 0, "the page does not scroll sideways"
    assert found["cut"] == []
    look = Numbers(json.loads(json.dumps(page.data)))
    for path, value in found["numbers"]:
        assert float(value) == look.value(path)


@pytest.mark.parametrize(
    "case", ["1f1b", "interleaved", "experts", "many micro-batches", "context", "two kinds"]
)
@pytest.mark.parametrize(("width", "dark"), [(1440, False), (390, False), (390, True)])
def test_a_page_in_a_browser(case, width, dark, tmp_path):
    check(report_of(case).page, tmp_path, width, dark)


@pytest.mark.parametrize("name", [*JOBS, *QUESTIONS])
def test_a_page_of_a_job_or_a_question(name, tmp_path):
    for width, dark in ((1440, False), (390, False), (390, True)):
        check(page_of(name), tmp_path, width, dark)


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [
        ("llama3-8b", "dgx-h100:8", 512),
        ("mixtral-8x7b", "dgx-h100:16", 512),
        ("llama3-405b", "dgx-h100:2048", 2048),
        ("llama3-8b", "dgx-h100:1+dgx-a100-80g:1", 128),
    ],
)
def test_pages_of_large_plans(model, cluster, batch, tmp_path):
    asked = Asked(model=model, cluster=cluster, global_batch=batch, seq=4096, time_limit_s=60.0)
    planner = Planner(asked, lambda text: None)
    report = planner.report(planner.plan({}, runners_up=True), {})
    for width in (1440, 390):
        check(report.page, tmp_path, width)
