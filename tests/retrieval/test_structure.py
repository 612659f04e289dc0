from __future__ import annotations

from retrieval.structure import Outline, find_headings


def test_markdown_headings_nest() -> None:
    text = "# A\n\nx\n\n## B\n\ny\n\n```\n# no heading\n```\n\n# C\n\nz\n"
    outline = Outline(text)
    assert outline.sections(text.index("y")) == ("A", "B")
    assert outline.sections(text.index("no heading")) == ("A", "B")
    assert outline.sections(text.index("z")) == ("C",)


def test_underlined_headings_nest_by_first_use() -> None:
    text = "Title\n=====\n\nOne\n---\n\na\n\nTwo\n---\n\nb\n"
    assert [h.level for h in find_headings(text)] == [1, 2, 2]
    assert Outline(text).sections(text.index("b\n")) == ("Title", "Two")


def test_table_rules_are_no_headings() -> None:
    assert find_headings("| a | b |\n| - | - |\n\n   indented\n   ----\n\n----\n") == []


def test_enclosing_lines_are_those_less_indented() -> None:
    text = ".. class:: Path(x)\n\n   About it.\n\n   .. method:: open()\n\n      Opens it.\n"
    assert Outline(text).enclosing(text.index("Opens")) == (".. class:: Path(x)", ".. method:: open()")
    assert Outline(text).enclosing(text.index("About")) == (".. class:: Path(x)",)
    assert Outline(text).enclosing(0) == ()
