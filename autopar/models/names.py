"""Names of models as people write them: `Qwen/Qwen3-235B-A22B`, `meta-llama/Llama-2-70b-hf`.

A spelling is read only if all of its words name one model of `published.yaml`, or say what changes
no dimension (`-Instruct`, `-hf`, a date). Other words may name another model, and are refused.
"""

from __future__ import annotations

import difflib
import re
from functools import lru_cache

from .published import ALIASES, published_models

_MOST_SUGGESTIONS = 6

_Words = tuple[str, ...]

REPOSITORIES = {
    "bloom": "bloom-176b",
    "c4ai-command-r-plus": "command-r-plus-104b",
    "c4ai-command-r-v01": "command-r-35b",
    "deepseek-llm-7b": "deepseek-7b",
    "deepseek-llm-67b": "deepseek-67b",
    "gpt2": "gpt2-small",
    "granite-3.0-2b": "granite3-2b",
    "granite-3.0-8b": "granite3-8b",
    "granite-3.0-1b-a400m": "granite3-1b-a400m",
    "granite-3.0-3b-a800m": "granite3-3b-a800m",
    "granite-20b-code-base-8k": "granite-20b-code",
    "llama-4-maverick-17b-128e": "llama4-maverick",
    "llama-4-scout-17b-16e": "llama4-scout",
    "mistral-7b-instruct-v0.2": "mistral-7b-v0.2",
    "mistral-7b-instruct-v0.3": "mistral-7b-v0.3",
    "mistral-large-instruct-2407": "mistral-large-123b",
    "mistral-large-instruct-2411": "mistral-large-123b",
    "mistral-nemo": "mistral-nemo-12b",
    "phi-3-medium-4k": "phi-3-medium",
    "phi-3-mini-4k": "phi-3-mini",
    "vit-base-patch16-224": "vit-b-16",
    "vit-huge-patch14-224": "vit-h-14",
    "vit-large-patch16-224": "vit-l-16",
}
"""Models by names of repositories that say their size otherwise, or not."""

_SAME = r"hf|instruct|base|chat|it|pt|thinking|deduped|uncased|bf16|fp8|v0\.1|\d{4}"
"""Words at the end of a name that change no dimension: training, format, date, first version."""
_END = re.compile(rf"[-_ ]+(?:{_SAME})$")
_DATE = re.compile(r"(?<=[-_ ])(?:0[1-9]|1[0-2])\d\d[-_ ]|(?<=[-_ ])2[45](?:0[1-9]|1[0-2])[-_ ]")


def model_named(text: str) -> str | None:
    """The name of the model that a text means; None if it means none, or may mean another."""
    plain = text.strip().lower()
    exact = ALIASES.get(plain, plain)
    if exact in published_models():
        return exact
    for name in dict.fromkeys((plain.replace("/", "-"), plain.rpartition("/")[2])):
        if (found := _named(name)) is not None:
            return found
    return None


def model_note(text: str) -> str:
    """A note on what a text for a model is taken as; '' if that is its own name, or none."""
    name = model_named(text)
    if name is None or name == text.strip().lower():
        return ""
    return f"model {text.strip()!r} is taken as {name}"


def near_models(text: str) -> list[str]:
    """Names of models like a text that means none, the nearest first."""
    name = text.strip().lower().rpartition("/")[2]
    words = _words(name.removeprefix("meta-"))
    begins = [model for key, model in _by_words().items() if words and key[: len(words)] == words]
    close = difflib.get_close_matches(name, [*published_models(), *ALIASES], n=3, cutoff=0.5)
    return list(dict.fromkeys([*begins, *close]))[:_MOST_SUGGESTIONS]


def _named(name: str) -> str | None:
    """The model of a name without its organization. Words at its end, and dates, are left out one
    after the other.
    """
    known, flat = _by_words(), _by_flat_words()
    shorter = name.removeprefix("meta-")
    while shorter:
        words = _words(shorter)
        if words in known:
            return known[words]
        if "." not in shorter and words in flat:
            return flat[words]
        left = _END.sub("", shorter)
        left = left if left != shorter else _DATE.sub("", shorter, count=1)
        if left == shorter:
            return None
        shorter = left
    return None


def _words(name: str) -> _Words:
    """The words and numbers of a name: `llama3.1-8b` -> ('llama', '3.1', '8', 'b')."""
    return tuple(re.findall(r"[a-z]+|\d+(?:\.\d+)*", name))


@lru_cache(maxsize=1)
def _by_words() -> dict[_Words, str]:
    names = {name: name for name in published_models()} | ALIASES | REPOSITORIES
    return {_words(name): model for name, model in names.items()}


@lru_cache(maxsize=1)
def _by_flat_words() -> dict[_Words, str]:
    """Models by their words where the points of numbers are separators: `qwen2-5-7b`."""
    return {
        tuple(part for word in words for part in word.split(".")): model
        for words, model in _by_words().items()
    }
