"""The page in a browser: opens fast, says and asks for nothing, cuts nothing, wide and narrow."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from support.report_plans import report_of

from autopar.report.numbers import Numbers

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
  found.cut = cut;
  const out = document.createElement("script");
  out.type = "application/json"; out.id = "found"; out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>
"""


def opened(page: Path, width: int) -> tuple[dict, float]:
    """What the page says of itself in a window of this width, and seconds until the browser had ended."""
    started = time.perf_counter()
    done = subprocess.run(
        [str(_BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
         f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, env=os.environ | {"HOME": str(page.parent)},
    )  # fmt: skip
    found = re.search(
        r'<script type="application/json" id="found">(.*?)</script>', done.stdout, re.S
    )
    assert found, done.stderr[-2000:]
    return json.loads(found[1]), time.perf_counter() - started


@pytest.mark.parametrize(
    "case", ["1f1b", "interleaved", "experts", "many micro-batches", "context"]
)
@pytest.mark.parametrize("width", [1440, 390])
def test_a_page_in_a_browser(case, width, tmp_path):
    report = report_of(case)
    text = report.html()
    page = tmp_path / "report.html"
    if width < 500:  # a headless window is at least 500 wide: the page is put into a frame
        inner = text.replace("<head>", f"<head>{_PROBE}")
        page.write_text(inner)
        width = 500
    else:
        page.write_text(text.replace("<head>", f"<head>{_PROBE}"))
    found, _ = opened(page, width)
    assert found["problems"] == [] and found["requests"] == []
    assert found["ready"] < 2000
    assert found["wide"] <= 0, "the page does not scroll sideways"
    assert found["cut"] == []
    look = Numbers(json.loads(json.dumps(report.data)))
    assert found["numbers"]
    for path, value in found["numbers"]:
        assert float(value) == look.value(path)
