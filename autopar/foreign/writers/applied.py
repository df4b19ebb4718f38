"""Differences of options, written into the text of a job's file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.job import JobFile
from autopar.foreign.writers.applied_python import in_python
from autopar.foreign.writers.values import typed
from autopar.foreign.writers.wording import POLICY, OptionDifference, is_script

_VALUE = r"(\"[^\"\n]*\"|'[^'\n]*'|(?!--)[^\s\"'\\)]+)"
"""A value of an option in a script."""


def applied(file: JobFile, differences: Sequence[OptionDifference]) -> tuple[str, dict[str, str]]:
    """(The text of a file with other options, the texts of other files that change, by name). Raises
    AutoparError if an option has no place there. Options of the training script are left out.
    """
    own = [difference for difference in differences if not difference.file]
    texts = dict[str, str]()
    for part in file.parts:
        if inside := [d for d in differences if d.file == part.name]:
            texts[part.name] = _in_mapping(part.text, part.name, inside)
    return _changed(file, own) if own else file.text, texts


def _changed(file: JobFile, differences: Sequence[OptionDifference]) -> str:
    suffix, text = file.name.rsplit(".", 1)[-1].lower(), file.text
    if suffix == "py" and not is_script(file):
        return in_python(text, differences, file.function)
    if not is_script(file) and suffix != "toml":
        return _in_mapping(text, file.name, differences)
    one = _in_script if is_script(file) else _in_toml
    for difference in differences:
        text = one(text, difference)
    return text


def _in_script(text: str, difference: OptionDifference) -> str:
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


def _in_toml(text: str, difference: OptionDifference) -> str:
    section, _, key = difference.option.rpartition(".")
    head = re.search(rf"^\[{re.escape(section)}\][ \t]*(#[^\n]*)?\n", text, re.MULTILINE)
    start = head.end() if head else len(text)
    following = re.search(r"^\[", text[start:], re.MULTILINE)
    end = start + following.start() if following else len(text)
    line = re.compile(rf"^[ \t]*{re.escape(key)}[ \t]*=[^\n]*\n?", re.MULTILINE)
    body = line.sub("", text[start:end])
    then = difference.then
    if then:
        value = typed(then)
        shown = str(value).lower() if isinstance(value, bool) else json.dumps(value)
        body = f"{key} = {shown}\n" + body
    before = text[:start] + ("" if head else f"\n[{section}]\n")
    return before + body + text[end:]


def _in_mapping(text: str, name: str, differences: Sequence[OptionDifference]) -> str:
    import yaml

    from autopar.foreign.frameworks.arguments import read_mapping

    data: dict[str, Any] = dict(read_mapping(text, name))
    for difference in differences:
        *blocks, key = difference.option.split(".")
        place = data
        for block in blocks:
            if not isinstance(place.get(block), dict):
                place[block] = {}
            place = place[block]
        if difference.then:
            place[key] = typed(difference.then)
        else:
            place.pop(key, None)
    if name.lower().endswith(".json"):
        return json.dumps(data, indent=2) + "\n"
    return yaml.safe_dump(data, sort_keys=False)
