"""Headings of Markdown, and what looks like them."""

from __future__ import annotations

import pytest

from tests.ask.places import place


class TestMarkdown:
    """A passage is found by its heading; what only looks like one would send the reader to a line of code."""

    def test_headings(self, read):
        text = "intro\n\n# One *big* `thing` [here](x) #\n\nfirst\n\nTwo\nlines\n---\n\nsecond\n\n###\n\nthird\n"
        document = read("a.md", text)
        assert document.text == text
        assert document.headings == ((text.index("# One"), "One big thing here"), (text.index("Two"), "Two lines"))
        assert place(document, "intro") == "line 1"
        assert place(document, "# One") == "line 3, under 'One big thing here'"
        assert place(document, "first\n\nTwo") == "lines 5-7, under 'One big thing here'"
        assert place(document, "second") == "line 11, under 'Two lines'"
        assert place(document, "third") == "line 15, under 'Two lines'"

    @pytest.mark.parametrize(
        "block",
        [
            "```sh\n# comment\n```",
            "~~~\n# comment\n===\n~~~",
            "    # comment",
            "> # comment",
            "- # comment",
            "<!--\n# comment\n-->",
            "#comment",
            "\\# comment",
            "####### comment",
        ],
    )
    def test_no_headings(self, read, block):
        document = read("a.markdown", f"# Real\n\n{block}\n\nafter\n")
        assert document.headings == ((0, "Real"),)

    def test_tags_do_not_make_it_a_page(self, read):
        text = "<html>\n<meta charset=iso-8859-1>\n\n# é\n"
        document = read("a.md", text)
        assert (document.text, document.headings) == (text, ((text.index("#"), "é"),))

    def test_lines_of_any_ending(self, read):
        document = read("a.md", "a\r\n\r\n# B\r\rc\u2028d\fe\n\n## D\n\nf")
        assert [words for _, words in document.headings] == ["B", "D"]
        assert place(document, "f") == "line 9, under 'D'"
        assert document.text[document.headings[1][0] :] == "## D\n\nf"

    def test_front_matter(self, read):
        document = read("a.md", "---\ntitle: Page\n# comment\n---\n\n# Real\n\nwords\n")
        assert document.headings == ((31, "Real"),)
        assert place(document, "words") == "line 8, under 'Real'"
        # Without keys these are two rules.
        assert read("a.md", "---\n\n# Real\n\n---\n").headings == ((5, "Real"),)

    def test_a_long_heading_is_shortened(self, read):
        document = read("a.md", f"# {'word ' * 100}\n\ntext")
        assert place(document, "text") == f"line 3, under '{'word ' * 15}word…'"
