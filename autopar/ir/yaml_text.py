"""Reads and writes users' YAML files, within size limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autopar.errors import shown
from autopar.files import write_text, yaml_loader

MOST_VALUES = 1_000_000
"""The largest number of values in a cluster file. `autopar calibrate` writes a few thousand."""


def read_yaml(text: str, last_counts: bool = False) -> Any:
    """The data of a YAML text, with numbers such as 24e9. Raises yaml.YAMLError if it is not valid, has too many values, or
    has a mapping with a key twice. With `last_counts`, the last value of such a key is kept.
    """
    import yaml

    try:
        loader = yaml_loader()
        root = yaml.compose(text, loader)
        _check_size(root)
        if not last_counts:
            _check_keys(root)
        return yaml.load(text, loader)  # a SafeLoader
    except RecursionError:
        raise yaml.YAMLError("it is nested too deep") from None
    except (
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
    ) as error:  # of tags that do not suit what they are on
        raise yaml.YAMLError(str(error)) from None


def _check_size(root: Any) -> None:
    """Raise yaml.YAMLError if a tree of YAML nodes has more than `MOST_VALUES` values once its
    aliases are expanded, or contains itself.
    """
    import yaml

    sizes: dict[int, int] = {}

    def size_of(node: Any) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if sizes.setdefault(id(node), 0) == 0:
            sizes[id(node)] = MOST_VALUES + 1  # what holds itself
            parts = [
                part
                for item in node.value
                for part in (item if isinstance(item, tuple) else (item,))
            ]
            sizes[id(node)] = 1 + sum(map(size_of, parts))
        return sizes[id(node)]

    if size_of(root) > MOST_VALUES:
        raise yaml.YAMLError(f"its aliases make it more than {MOST_VALUES:,} values")


def _check_keys(root: Any) -> None:
    """Raise yaml.YAMLError if a mapping anywhere in a tree of YAML nodes has a key twice ('<<'
    excepted).
    """
    import yaml

    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        pairs = (
            node.value if isinstance(node, yaml.MappingNode) else [(item,) for item in node.value]
        )
        waiting += [part for pair in pairs for part in pair]
        keys = [
            (pair[0].tag, pair[0].value)
            for pair in pairs
            if len(pair) == 2 and isinstance(pair[0], yaml.ScalarNode)
        ]
        if twice := [
            key
            for place, (tag, key) in enumerate(keys)
            if (tag, key) in keys[:place] and not tag.endswith(":merge")
        ]:
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown(twice[0])} is given twice", node.start_mark
            )


def written_yaml(data: dict[str, Any], path: str | Path | None) -> str:
    """The data as YAML text. Also writes it to `path` as a cluster file, unless that is None."""
    import yaml

    text = yaml.safe_dump(
        data, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=None
    )
    if path is not None:
        write_text(path, text, "cluster file")
    return text
