"""Writes SVG: a few shapes, in colours that a page or the drawing itself names.

Classes name colours (`c-tp`, `m-kept`), so that one drawing serves light and dark pages. A number
in a drawing carries its value and its path in the output of `--json`, as in the rest of a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from autopar.text.numbers import Number

COLOURS = {
    "c-forward": ("#7cc1ee", "#93cdf3"),
    "c-backward": ("#0072b2", "#1f6fae"),
    "c-weights": ("#00456e", "#124a75"),
    "c-recompute": ("#9aa0a6", "#8a9096"),
    "c-host": ("#b5a642", "#cfc164"),
    "c-optimizer": ("#7a5195", "#a884c4"),
    "c-fixed": ("#c9ccd1", "#5c6066"),
    "c-tp": ("#e69f00", "#e8ad2c"),
    "c-cp": ("#cc79a7", "#d48fb6"),
    "c-ep": ("#b3a300", "#d9cb3f"),
    "c-dp": ("#009e73", "#24b78c"),
    "c-p2p": ("#d55e00", "#ec7d2a"),
    "c-idle": ("#eceef0", "#2b2e32"),
    "c-ideal": ("#3f6e3a", "#79b573"),
    "c-slow": ("#0072b2", "#2387c9"),
    "k0": ("#dcebf7", "#23394a"),
    "k1": ("#fbe9c8", "#4a3d1f"),
    "k2": ("#d6efe5", "#1f4035"),
    "k3": ("#f3dfea", "#46303d"),
    "m-parameters": ("#0072b2", "#2387c9"),
    "m-gradients": ("#56b4e9", "#6fc0ee"),
    "m-optimizer": ("#7a5195", "#a884c4"),
    "m-fixed": ("#b4b8be", "#6a6f76"),
    "m-kept": ("#e69f00", "#e8ad2c"),
    "m-transient": ("#d55e00", "#ec7d2a"),
}
"""The fill of each class, on a light and on a dark page."""
_SLANTS = {"c-recompute": 0, "c-tp": 45, "c-cp": 90, "c-ep": 20, "c-dp": 135, "m-kept": 45,
           "m-transient": 135}  # fmt: skip
"""Degrees of the stripes of classes that are also striped, so that they can be told apart without colour."""
_INK = {"ink": ("#1c1e21", "#e8e9ea"), "soft": ("#5b6067", "#a3a8ae"), "line": ("#c4c8cd", "#44484d"),
        "page": ("#ffffff", "#17181a"), "box": ("#f7f7f8", "#202225"), "bad": ("#b3261e", "#f2796f")}  # fmt: skip


@dataclass(slots=True)
class Svg:
    """A drawing of `width` by `height` units, of which the figure `title` says what it shows.
    `name` is the name of its file, without the ending.
    """

    name: str
    title: str
    width: float
    height: float
    data: str = ""
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, cls: str, title: str = "") -> None:
        """A rectangle; a title is shown when the pointer is on it."""
        box = f'x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}"'
        self._add("rect", f'class="{cls}" {box}', title)

    def path(self, d: str, cls: str, title: str = "") -> None:
        """A path, in the language of the attribute `d`."""
        self._add("path", f'class="{cls}" d="{d}"', title)

    def boxes(self, boxes: Iterable[tuple[float, float, float, float]], cls: str) -> None:
        """Many rectangles (x, y, width, height) of one class, as one path."""
        found = []
        for x, y, w, h in boxes:
            left, wide = _n(x, 1), _n(max(w, 0.1), 1)
            found.append(f"M{left} {_n(y)}h{wide}v{_n(h)}h-{wide}z")
        if found:
            self.path("".join(found), cls)

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str = "line") -> None:
        """A straight line."""
        self.parts.append(
            f'<line class="{cls}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>'
        )

    def text(
        self, x: float, y: float, text: str | Number, cls: str = "ink", anchor: str = "start"
    ) -> None:
        """A text, or a number with its value and path. `anchor` is 'start', 'middle' or 'end'."""
        words, more = text, ""
        if isinstance(text, Number):
            words, more = text.text, f" {text.attributes}"
        place = f'x="{_n(x)}" y="{_n(y)}"' + (
            f' text-anchor="{anchor}"' if anchor != "start" else ""
        )
        self.parts.append(f'<text class="{cls}" {place}{more}>{escape(str(words))}</text>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> float:
        """Squares of the classes with words beside them, in rows. Returns the y below them."""
        at = x
        for cls, words in entries:
            wide = 24 + 7.1 * len(words)
            if at + wide > self.width - 8 and at > x:
                at, y = x, y + 18
            self.rect(at, y, 12, 12, cls)
            self.text(at + 17, y + 10.5, words, "soft")
            at += wide + 8
        return y + 20

    def _add(self, tag: str, attributes: str, title: str) -> None:
        inside = f"><title>{escape(title)}</title></{tag}>" if title else "/>"
        self.parts.append(f"<{tag} {attributes}{inside}")

    def inline(self) -> str:
        """The drawing as an element of a page that has `styles` and `patterns`."""
        more = f" {self.data}" if self.data else ""
        return (
            f'<svg id="fig-{self.name}" role="img" aria-label="{escape(self.title)}"'
            f' viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
            f' style="min-width:{_n(min(self.width, 620))}px;max-width:{_n(self.width * 1.1)}px"{more}>{"".join(self.parts)}</svg>'
        )

    def standalone(self) -> str:
        """The drawing as the text of an SVG file, light or dark as the viewer is."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
            f' width="{_n(self.width)}" height="{_n(self.height)}" role="img">'
            f"<title>{escape(self.title)}</title><style>{styles()}</style>{patterns()}"
            f'<rect class="page" width="{_n(self.width)}" height="{_n(self.height)}"/>'
            f"{''.join(self.parts)}</svg>\n"
        )


def styles() -> str:
    """The styles of all classes, light and dark, as CSS."""
    light, dark = (
        "".join(f"--{name}:{pair[k]};" for name, pair in {**COLOURS, **_INK}.items())
        for k in (0, 1)
    )
    rules = [f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"]
    rules += [f".{name}{{fill:{_fill(name)}}}" for name in COLOURS]
    rules.append(
        "svg text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif}svg text.small{font-size:10px}"
        "svg text.strong{font-weight:600}.ink,.strong{fill:var(--ink)}.soft,.small{fill:var(--soft)}"
        ".page{fill:var(--page)}.box{fill:var(--box);stroke:var(--line)}.bad{fill:var(--bad)}"
        ".line{stroke:var(--line);fill:none}.limit{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:5 3;fill:none}"
        ".coll{fill:var(--c-p2p);paint-order:stroke;stroke:var(--page);stroke-width:3px}"
        "svg text.coll{font-size:11px}.flow{stroke:var(--soft);stroke-width:1.3;fill:none}"
        ".dot{fill:var(--c-backward)}.chosen{fill:var(--c-p2p)}"
    )
    return "".join(rules)


def patterns() -> str:
    """The stripes that `styles` refers to, as SVG definitions."""
    found = "".join(
        f'<pattern id="p-{name}" width="5" height="5" patternUnits="userSpaceOnUse"'
        f' patternTransform="rotate({_SLANTS[name]})"><rect width="5" height="5" style="fill:var(--{name})"/>'
        f'<path d="M0 0h5" style="stroke:var(--page);stroke-width:1.1;opacity:.55"/></pattern>'
        for name in _SLANTS
    )
    return f"<defs>{found}</defs>"


def _fill(name: str) -> str:
    return f"url(#p-{name})" if name in _SLANTS else f"var(--{name})"


def _n(value: float, decimals: int = 2) -> str:
    """A coordinate, rounded to `decimals`, without trailing zeros."""
    text = f"{value:.{decimals}f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
