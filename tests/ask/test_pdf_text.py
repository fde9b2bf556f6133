"""PDF files, page by page."""

from __future__ import annotations

import io
import logging
import re

import pypdf
import pytest

from tests.ask.pdfs import pdf
from tests.ask.places import place
from theodolite.ask import pdf_text


class TestPdf:
    """Readers open a PDF at a page, and what it does not say has to be told."""

    def test_pages(self, read):
        document = read(
            "a.bin", pdf(["first page\nsecond line", "another (page)".replace("(", "").replace(")", ""), "z"])
        )
        assert document.text == "first page\nsecond line\n\nanother page\n\nz"
        assert place(document, "second line") == "page 1"
        assert place(document, "another") == "page 2"
        assert place(document, "z") == "page 3"
        assert place(document, "line\n\nanother") == "pages 1-2"
        assert place(document, "line\n\nanother page\n\nz") == "pages 1-3"
        assert (document.notes, document.headings) == ((), ())

    def test_labels(self, read):
        labels = "<< /Nums [0 << /S /r >> 2 << /S /D >>] >>"
        document = read("a.pdf", pdf(["one", "two", "three", "four"], labels=labels))
        assert document.labels == ("i", "ii", "1", "2")
        assert place(document, "two") == "page 2 (labelled ii)"
        assert place(document, "two\n\nthree") == "pages 2-3 (labelled ii-1)"
        same = read("a.pdf", pdf(["one", "two"], labels="<< /Nums [0 << /S /D >>] >>"))
        assert place(same, "two") == "page 2"

    def test_pages_without_text(self, read):
        document = read("a.pdf", pdf(["one", None, None, "four", None]))
        assert document.notes == ("a.pdf: pages 2-3, 5 have no text (pictures, or empty)",)
        assert (place(document, "one"), place(document, "four")) == ("page 1", "page 4")
        assert read("a.pdf", pdf([None, "b"])).notes == ("a.pdf: page 1 has no text (pictures, or empty)",)

    def test_pictures_alone(self, read):
        with pytest.raises(
            ValueError, match=r"'a.pdf' is a PDF of pictures, without text; add it with OCR first, such as ocr"
        ):
            read("a.pdf", pdf([None, None]))

    def test_a_page_that_cannot_be_read(self, read, monkeypatch):
        extract = pypdf.PageObject.extract_text

        def fails(page, *given, **named):
            if page.page_number == 1:
                raise KeyError("/Font")
            return extract(page, *given, **named)

        monkeypatch.setattr(pypdf.PageObject, "extract_text", fails)
        document = read("a.pdf", pdf(["one", "two", None]))
        assert document.notes == (
            "a.pdf: page 3 has no text (pictures, or empty)",
            "a.pdf: page 2 has damage, and nothing was read",
        )
        assert place(document, "one") == "page 1"
        monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda page: 1 / 0)
        with pytest.raises(ValueError, match="a damaged PDF with no page that can be read"):
            read("a.pdf", pdf(["one", "two"]))

    @pytest.mark.parametrize("kept", [9, 40, 200])
    def test_damaged(self, read, kept):
        with pytest.raises(ValueError, match=r"'a.pdf' is a damaged PDF"):
            read("a.pdf", pdf(["one"])[:kept])

    def test_what_fonts_cannot_say(self, read, monkeypatch):
        monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda page: "a\0 \ud83d\ude00 \ud83d b\r\nc")
        assert read("a.pdf", pdf(["one"])).text == "a \N{GRINNING FACE} \ufffd b\nc"

    @staticmethod
    def encrypted(password: str, algorithm: str) -> bytes:
        writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf(["secret words"])))
        writer.encrypt(password, "owner", algorithm=algorithm)
        out = io.BytesIO()
        writer.write(out)
        return out.getvalue()

    @pytest.mark.parametrize("algorithm", ["AES-128", "AES-256"])
    def test_encrypted(self, read, algorithm):
        assert read("a.pdf", self.encrypted("", algorithm)).text == "secret words"
        with pytest.raises(ValueError, match=r"'a.pdf' is a PDF that needs a password; remove it with qpdf"):
            read("a.pdf", self.encrypted("open sesame", algorithm))

    def test_without_what_decrypts(self, read, monkeypatch):
        def missing(*given: object) -> None:
            raise pypdf.errors.DependencyError("cryptography>=3.1 is required for AES algorithm")

        locked = self.encrypted("", "AES-256")
        monkeypatch.setattr(pdf_text, "PdfReader", missing)
        with pytest.raises(ImportError, match=r"'a.pdf' is encrypted; pip install 'theodolite\[ask\]' \(cryptography"):
            read("a.pdf", locked)

    def test_nothing_is_logged(self, read, caplog, capfd):
        caplog.set_level(logging.DEBUG)
        # A wrong place of the table is repaired, and told in the log.
        moved = re.sub(rb"startxref\n\d+", b"startxref\n7", pdf(["one"]))
        pypdf.PdfReader(io.BytesIO(moved)).pages[0].extract_text()
        assert caplog.records
        caplog.clear()
        capfd.readouterr()
        assert read("a.pdf", moved).text == "one"
        assert not caplog.records
        assert capfd.readouterr() == ("", "")
        pypdf.PdfReader(io.BytesIO(moved))
        assert caplog.records

    def test_junk_before_it(self, read):
        document = pdf(["one"])
        assert read("a.txt", b"\xef\xbb\xbf\r\n" + document).text == "one"
        assert read("a.pdf", b"HTTP/1.1 200 OK\r\n\r\n" + document).text == "one"
        assert read("a.txt", "How %PDF- begins").text == "How %PDF- begins"

    def test_ranges(self):
        assert pdf_text.ranges([1, 2, 3, 5, 7, 8]) == "1-3, 5, 7-8"
