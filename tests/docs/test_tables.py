"""Tables in pages equal what the code gives: `cog -r -I docs docs/guides/*.md` writes them again."""

from __future__ import annotations

import importlib.util
import re

import pytest
from support.prose import ROOT, pages

_BLOCK = re.compile(
    r"<!-- \[\[\[cog\nimport cog, tables; cog\.out\(tables\.(\w+)\(\)\)\n\]\]\] -->\n(.*?)<!-- \[\[\[end\]\]\] -->\n",
    re.DOTALL,
)
_BLOCKS = [match for path in pages() for match in _BLOCK.finditer(path.read_text())]


def test_every_block_is_found() -> None:
    assert len(_BLOCKS) == sum(path.read_text().count("[[[cog") for path in pages())


@pytest.mark.parametrize("block", _BLOCKS, ids=[block[1] for block in _BLOCKS])
def test_table_is_what_the_code_gives(block: re.Match[str]) -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    table = getattr(tables, block[1])()
    assert table.count("\n") > 4
    assert block[2] == table
