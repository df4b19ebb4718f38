"""Differences of options, written into the text of a job's file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from autopar.errors import AutoparError
from autopar.jobs.wording import POLICY, Difference, is_script
from autopar.targets.job import JobFile

_VALUE = r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'\\)]+)"
"""A value of an option in a script."""


def applied(file: JobFile, differences: Sequence[Difference]) -> str:
    """The text of a file with other options. Raises AutoparError if an option has no place there.
    Options of other files are left out.
    """
    differences = [d for d in differences if ": " not in d.option]
    suffix = file.name.rsplit(".", 1)[-1].lower()
    if is_script(file):
        text = file.text
        for difference in differences:
            text = _in_script(text, difference)
        return text
    if suffix == "py":
        return _in_python(file.text, differences)
    if suffix == "toml":
        text = file.text
        for difference in differences:
            text = _in_toml(text, difference)
        return text
    return _in_mapping(file, differences)


def _in_script(text: str, difference: Difference) -> str:
    option, then = difference.option, difference.then
    if option.startswith("export "):
        name = option.removeprefix("export ")
        found = re.compile(rf"(?<!\S)(export\s+)?{name}=\S*")
        if not then:
            return found.sub("", text)
        if found.search(text):
            return found.sub(f"export {name}={then}", text)
        first, rest = _after_head(text)
        return f"{first}export {name}={then}\n{rest}"
    if option == POLICY:
        return _policy(text, then)
    if not option.startswith("-"):
        return _override(text, option, then)
    name = re.escape(option)
    taken = re.compile(rf"(?<![\w-]){name}(?:(=|[ \t]+){_VALUE})?(?![\w-])")
    kept = then in ("", "on")
    if difference.now == "on":
        taken = re.compile(rf"(?<![\w-]){name}(?![\w-])")
    if taken.search(text):
        if not then:
            return taken.sub("", text)
        return taken.sub(lambda match: option if kept else f"{option} {_quoted(then)}", text)
    if not then:
        raise AutoparError(f"{option} does not stand in the file")
    return _added(text, option if then == "on" else f"{option} {_quoted(then)}")


def _policy(text: str, then: str) -> str:
    """The text with another policy of torchtitan 0.3, which stands behind its options."""
    found = re.compile(r"(?<!\S)activation-checkpoint:\S+")
    if found.search(text):
        return found.sub(f"activation-checkpoint:{then}", text)
    options = list(re.finditer(rf"--(parallelism|training|config|module)\S*[ =]+{_VALUE}", text))
    if not options:
        raise AutoparError("there is no place for activation-checkpoint")
    at = options[-1].end()
    return f"{text[:at]} activation-checkpoint:{then}{text[at:]}"


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[\w./+-]+", text) else f"'{text}'"


def _after_head(text: str) -> tuple[str, str]:
    """(the first line of a script and what `#SBATCH` lines follow, the rest)."""
    head = re.match(r"(#[^\n]*\n|\s*\n)*", text)
    at = head.end() if head else 0
    return text[:at], text[at:]


def _added(text: str, words: str) -> str:
    """The text with words before the first option of the command that trains."""
    names = (
        r"micro[-_]batch[-_]size|(pipeline|tensor)[-_]model[-_]parallel[-_]size|num[-_]layers|zero_stage|ds\.\w+|"
        r"per_device_train_batch_size|train\.micro_batch_size|micro_train_batch_size|training\.\w+|parallelism\.\w+"
    )
    marks = rf"(?<!\S)--({names})\b"
    if not (found := re.search(marks, text)):
        raise AutoparError(f"there is no place for {words}")
    return f"{text[: found.start()]}{words} {text[found.start() :]}"


def _override(text: str, option: str, then: str) -> str:
    """The text with an override in Hydra's form."""
    found = re.compile(rf"(?<![\w.])(\+*){re.escape(option)}={_VALUE}?")
    if not then:
        return found.sub("", text)
    if found.search(text):
        return found.sub(lambda match: f"{match[1]}{option}={_quoted(then)}", text)
    first = re.search(r"(?<![\w.])\+*(model|train|data|engine|actor_rollout_ref|trainer)\.[\w.]+=", text)  # fmt: skip
    if not first:
        raise AutoparError(f"there is no place for {option}")
    return f"{text[: first.start()]}{option}={_quoted(then)} {text[first.start() :]}"


def _in_python(text: str, differences: Sequence[Difference]) -> str:
    """The text of a recipe with assignments before its last `return`."""
    left: list[Difference] = []
    for difference in differences:
        if changed := _keyword(text, difference):
            text = changed
        else:
            left.append(difference)
    returns = list(re.finditer(r"^([ \t]+)return (\w+)[ \t]*$", text, re.MULTILINE))
    if not left:
        return text
    if not returns:
        raise AutoparError("no function of the file returns a name that could be changed")
    for match in reversed(returns):
        lines = [f"{match[1]}{match[2]}.{d.option} = {_python(d.then)}\n" for d in left]
        text = text[: match.start()] + "".join(lines) + text[match.start() :]
    return text


def _keyword(text: str, difference: Difference) -> str:
    """The text with another keyword argument of a call, as `Call.name` says it; '' if it has no such
    call.
    """
    call, _, name = difference.option.rpartition(".")
    call = call.rpartition(".")[2]
    start = (
        re.search(rf"\b{re.escape(call)}\(", text) if call[:1].isupper() or difference.now else None
    )
    if start is None or not call:
        return ""
    rest = text[start.end() :]
    own = re.search(rf"(?<![\w.]){re.escape(name)}\s*=\s*[^,)\n]+", rest)
    if own and difference.then:
        rest = rest[: own.start()] + f"{name}={_python(difference.then)}" + rest[own.end() :]
    elif difference.then:
        rest = f"{name}={_python(difference.then)}, {rest}"
    else:
        return ""
    return text[: start.end()] + rest


def _python(then: str) -> str:
    return "None" if not then else repr(_typed(then))


def _typed(text: str) -> Any:
    """A text as the number, truth value or list that it says."""
    if text in ("on", "true", "True"):
        return True
    if text in ("false", "False"):
        return False
    if text.startswith("[["):
        return json.loads(text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _in_toml(text: str, difference: Difference) -> str:
    section, _, key = difference.option.rpartition(".")
    head = re.search(rf"^\[{re.escape(section)}\][ \t]*(#[^\n]*)?\n", text, re.MULTILINE)
    start = head.end() if head else len(text)
    following = re.search(r"^\[", text[start:], re.MULTILINE)
    end = start + following.start() if following else len(text)
    line = re.compile(rf"^[ \t]*{re.escape(key)}[ \t]*=[^\n]*\n?", re.MULTILINE)
    body = line.sub("", text[start:end])
    then = difference.then
    if then:
        value = _typed(then)
        shown = str(value).lower() if isinstance(value, bool) else json.dumps(value)
        body = f"{key} = {shown}\n" + body
    before = text[:start] + ("" if head else f"\n[{section}]\n")
    return before + body + text[end:]


def _in_mapping(file: JobFile, differences: Sequence[Difference]) -> str:
    import yaml

    from autopar.targets.arguments import read_mapping

    data: dict[str, Any] = dict(read_mapping(file.text, file.name))
    for difference in differences:
        *blocks, key = difference.option.split(".")
        place = data
        for block in blocks:
            if not isinstance(place.get(block), dict):
                place[block] = {}
            place = place[block]
        if difference.then:
            place[key] = _typed(difference.then)
        else:
            place.pop(key, None)
    if file.name.lower().endswith(".json"):
        return json.dumps(data, indent=2) + "\n"
    return yaml.safe_dump(data, sort_keys=False)
