"""Parts of a module are taken out of its source although it cannot be imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.skyrl.source import taken

MODULE = """
import a_database_that_is_not_there

LIMIT = 3

class Row:
    def __init__(self, number: Number) -> None:
        self.number = min(number, LIMIT)

async def rows() -> Table:
    return Row(5)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    inner = tmp_path / "a_release" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "a_release" / "__init__.py").touch()
    (inner / "__init__.py").write_text("import a_database_that_is_not_there")
    (inner / "rows.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "a_release.inner.rows"


def test_a_class_with_its_constants_is_taken(package: str):
    assert taken(package, ["Row", "LIMIT"], {})["Row"](5).number == 3


def test_hints_are_evaluated_where_they_matter(package: str):
    with pytest.raises(NameError, match="Number"):
        taken(package, ["Row"], {}, hints_matter=True)
    assert taken(package, ["Row"], {"Number": int}, hints_matter=True)["Row"].__init__.__annotations__["number"] is int


def test_a_name_that_is_not_there_is_not_given(package: str):
    assert "Column" not in taken(package, ["Column"], {})
