"""Documents as text, with places that a reader can find; and what is none."""

from __future__ import annotations

import io
import os
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ask.places import place
from theodolite.ask.documents import Document, read_document
from theodolite.survey.texts import BUILTIN, builtin_text


class TestPlainText:
    """Most documents are plain text, and a wrong line number sends the reader astray."""

    def test_lines(self, read):
        document = read("a.txt", "one\ntwo\r\n\r\nfour\rfive")
        assert document == Document(name="a.txt", text="one\ntwo\n\nfour\nfive")
        assert [place(document, word) for word in ("one", "two", "four", "five")] == [f"line {n}" for n in (1, 2, 4, 5)]
        assert place(document, "wo\n\nfo") == "lines 2-4"
        # A newline belongs to the line that it ends.
        assert (document.place(3, 4), document.place(4, 4), document.place(18, 18)) == ("line 1", "line 2", "line 5")

    @given(text=st.text("ab\n", min_size=1, max_size=40), bounds=st.tuples(st.integers(0, 40), st.integers(0, 40)))
    def test_any_passage(self, text, bounds):
        start, end = sorted(min(bound, len(text)) for bound in bounds)
        first = len(text[:start].split("\n"))
        last = len(text[: max(start, end - 1)].split("\n"))
        expected = f"line {first}" if first == last else f"lines {first}-{last}"
        assert Document(name="a", text=text).place(start, end) == expected

    @pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 4), (4, 4)])
    def test_no_such_characters(self, start, end):
        with pytest.raises(ValueError, match=rf"got characters {start} to {end}; 'a' has 3"):
            Document(name="a", text="abc").place(start, end)

    def test_other_names_are_plain_text(self, read):
        text = "# no heading\n<p>no tag</p>\n"
        for name in ("a", "a.py", "a.rst", "a.md.txt"):
            assert read(name, text) == Document(name=name, text=text)

    def test_books_of_the_package(self):
        for name in BUILTIN:
            document = read_document(name)
            assert (document.name, document.text) == (name, builtin_text(name))
        start = document.text.index("\n", 1000) + 1
        assert document.place(start, start + 1) == f"line {document.text[:start].count(chr(10)) + 1}"

    def test_a_large_file(self, read):
        line = "All the world is a stage, and all the men and women.\n"
        document = read("a.txt", line * 200_000)
        assert document.place(len(document.text) - 5, len(document.text)) == "line 200000"


class TestRefused:
    """An error says what the file looks like and what to do; half a text is worse than none."""

    @pytest.mark.parametrize(
        ("start", "told"),
        [
            (b"\x89PNG\r\n\x1a\n", "a PNG picture; read its text with OCR"),
            (b"\xff\xd8\xff\xe0", "a JPEG picture"),
            (b"GIF89a", "a GIF picture"),
            (b"\x1f\x8b\x08", "a gzip file; unpack it first"),
            (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office file"),
            (b"{\\rtf1 text", "an RTF file; save it as text, HTML or PDF"),
            (b"%!PS-Adobe", "a PostScript file; convert it with ps2pdf"),
            (b"GGUF\x03\0\0\0", "a GGUF model; give a document"),
            (b"SQLite format 3\0", "an SQLite database"),
        ],
    )
    @pytest.mark.parametrize("name", ["a.txt", "a.html", "a.md"])
    def test_known_binaries(self, read, name, start, told):
        with pytest.raises(ValueError, match=f"document: {name!r} looks like {told}"):
            read(name, start + b"\0\1\2\xff" * 20)

    def test_a_real_zip(self, read):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("word/document.xml", "<w/>")
        with pytest.raises(
            ValueError, match="looks like a zip archive, as docx, odt and epub files are; save it as text"
        ):
            read("a.docx", packed.getvalue())

    def test_texts_that_begin_like_binaries(self, read):
        for text in ("GIF89a is how a picture begins.", "GGUF, a format", "RIFF RAFF", "ID3 decision trees"):
            assert read("a.txt", text).text == text

    @pytest.mark.parametrize("content", ["", " \n\t\n", "\ufeff", "\ufeff\r\n"])
    @pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html"])
    def test_empty(self, read, name, content):
        with pytest.raises(ValueError, match=f"document: {name!r} is empty; give a file with text"):
            read(name, content)

    def test_no_words_on_a_page(self, read):
        with pytest.raises(ValueError, match=r"'a.html' is empty"):
            read("a.html", "<html><body><img src=x><script>words()</script></body></html>")

    def test_no_file(self, tmp_path):
        with pytest.raises(
            ValueError, match=r"no file '.*none.txt'; give a file .*, or one of chinese-classics, moby-dick"
        ):
            read_document(tmp_path / "none.txt")
        with pytest.raises(ValueError, match=r"document: '.*' is a folder; give its files"):
            read_document(tmp_path)
        with pytest.raises(ValueError, match="got '-', and standard input is not read"):
            read_document("-")

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
    def test_a_fifo(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ValueError, match="is no regular file; write what it gives to a file first"):
            read_document(tmp_path / "pipe")

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
    def test_no_right_to_read(self, tmp_path):
        (tmp_path / "a.txt").write_text("abc", encoding="utf-8")
        (tmp_path / "a.txt").chmod(0)
        with pytest.raises(ValueError, match=r"'.*a.txt' cannot be read: Permission denied"):
            read_document(tmp_path / "a.txt")
