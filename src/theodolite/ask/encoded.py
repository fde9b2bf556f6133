"""Bytes of a file as text: by a mark, by a given encoding, or as UTF-8; what is no text is refused by name."""

from __future__ import annotations

import codecs
import re

# The longer marks first: that of UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_CONVERT = "save it as text, HTML or PDF"
_BINARY = (
    (b"PK\x03\x04", "a zip archive, as docx, odt and epub files are", _CONVERT),
    (b"PK\x05\x06", "an empty zip archive", _CONVERT),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office file (doc, xls, ppt)", _CONVERT),
    (b"{\\rtf", "an RTF file", _CONVERT),
    (b"%!PS", "a PostScript file", "convert it with ps2pdf"),
    (b"\x1f\x8b", "a gzip file", "unpack it first"),
    (b"BZh", "a bzip2 file", "unpack it first"),
    (b"\xfd7zXZ\x00", "an xz file", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    (b"Rar!\x1a\x07", "a rar archive", "unpack it first"),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", "read its text with OCR first, such as tesseract"),
    (b"\xff\xd8\xff", "a JPEG picture", "read its text with OCR first, such as tesseract"),
    (b"GIF8", "a GIF picture", "read its text with OCR first, such as tesseract"),
    (b"II*\x00", "a TIFF picture", "read its text with OCR first, such as tesseract"),
    (b"MM\x00*", "a TIFF picture", "read its text with OCR first, such as tesseract"),
    (b"RIFF", "a RIFF file (a picture, sound or video)", "give a file of text"),
    (b"ID3", "a sound file", "give a file of text"),
    (b"SQLite format 3\x00", "an SQLite database", "export what it holds as text"),
    (b"GGUF", "a GGUF model", "give a document; a model is no document"),
    (b"\x7fELF", "a program", "give a file of text"),
)


def refuse_binary(data: bytes, name: str) -> None:
    """Raise for the files that are known by their first bytes and have no text to read as it is.

    Raises:
        ValueError: it says what the file looks like, and what to do.
    """
    for magic, what, remedy in _BINARY:
        # Letters alone may begin a text ("GIF8 is the magic of ..."): it takes a byte that no text has to be sure.
        if data.startswith(magic) and (not magic.isalnum() or b"\0" in data[:4096]):
            raise ValueError(f"document: {name!r} looks like {what}; {remedy}")


def decode(data: bytes, name: str, *, encoding: str | None = None, declared: str | None = None) -> str:
    """The text of a file, with its newlines as \\n.

    Args:
        data: the whole file.
        name: what an error calls it.
        encoding: what the caller says it is, which goes before everything.
        declared: what the file says it is, which a mark at its start goes before; UTF-8 if it says nothing.

    Raises:
        ValueError: an unknown encoding, bytes that are not in it, or NUL characters.
    """
    codec = encoding or next((codec for mark, codec in _MARKS if data.startswith(mark)), None) or declared or "utf-8"
    _require_codec(codec)
    try:
        # Strict in both directions: half of a surrogate pair is no character, and no tokenizer takes it.
        text = data.decode(codec)
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeDecodeError as error:
        hint = "give another encoding"
        if encoding is None:
            hint = "give its encoding (encoding='cp1252', --encoding cp1252)"
        raise ValueError(f"document: {name!r} is not {codec} (byte {error.start}); {hint}") from None
    except UnicodeError:
        raise ValueError(f"document: {name!r} is not {codec}; give another encoding") from None
    text = text.removeprefix("\ufeff")
    if "\0" in text:
        raise ValueError(
            f"document: {name!r} has NUL characters, as a binary file has, or UTF-16 without a mark; "
            "give a file of text, or its encoding (encoding='utf-16-le', --encoding utf-16-le)"
        )
    return newlines(text)


def newlines(text: str) -> str:
    """`text` with \\r\\n and \\r as \\n."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def whole_characters(text: str) -> str:
    """`text` with pairs of surrogates as the characters that they mean, and halves of pairs as \ufffd."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def printable_name(name: str) -> str:
    """A file's name as text of one line, whatever bytes it has."""
    known = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return re.sub(r"[\x00-\x1f\x7f\u2028\u2029]+", " ", known)


def _require_codec(codec: str) -> None:
    try:
        # bytes.decode refuses what makes no text (rot13, zlib), and looks nothing up for no bytes.
        bytes(4).decode(codec)
    except UnicodeError:
        # It is known, which is all that is asked here.
        return
    except (LookupError, ValueError):
        raise ValueError(
            f"encoding: got {codec!r}, which is no encoding of text; allowed are Python's, such as 'utf-8', 'cp1252' "
            "or 'gb18030'"
        ) from None
