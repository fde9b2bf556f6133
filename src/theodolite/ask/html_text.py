"""The text of an HTML page, a line for each paragraph, heading, list item and table row."""

from __future__ import annotations

import codecs
import re
import warnings
from collections.abc import Iterator

try:
    from bs4 import BeautifulSoup
    from bs4.dammit import EncodingDetector
    from bs4.element import NavigableString, PageElement, PreformattedString, Tag
    from bs4.exceptions import ParserRejectedMarkup
except ImportError as error:
    raise ImportError("reading HTML needs beautifulsoup4: pip install 'theodolite[ask]'") from error

from theodolite.ask.encoded import newlines, whole_characters

_HIDDEN = re.compile("script|style|template|noscript|iframe|noframes|object|canvas|audio|video|datalist").fullmatch
_HEADING = re.compile("title|h[1-6]").fullmatch
_PARAGRAPH = re.compile("title|h[1-6]|p|ul|ol|dl|table|pre|blockquote|figure|hr|section|article").fullmatch
_LINE = re.compile(
    "li|dt|dd|tr|caption|thead|tbody|tfoot|div|main|header|footer|nav|aside|address|figcaption|details|summary|form|"
    "fieldset|legend|option|optgroup|select|textarea|button|body|html|head|center|dialog|menu"
).fullmatch
_CELL = re.compile("td|th").fullmatch
_SPACE = re.compile(r"[ \t\n\f\xa0]+")

# What a page means when it names these, by the WHATWG's encoding standard.
_MEANT = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
    "utf-16": "utf-8",
    "utf-16-le": "utf-8",
    "utf-16-be": "utf-8",
}


def declared_encoding(data: bytes) -> str | None:
    """The encoding that a page names in its first lines, as browsers take it; None if none or one that is unknown."""
    named = EncodingDetector.find_declared_encoding(data, is_html=True)
    if named is None:
        return None
    try:
        codec = codecs.lookup(named).name
        bytes(4).decode(codec)
    except (LookupError, ValueError):
        return None
    codec = _MEANT.get(codec, codec)
    if codec == "cp1252":
        try:
            data.decode(codec)
        except UnicodeDecodeError:
            # Five bytes have no character in cp1252; browsers read them as Latin-1 does.
            return "latin-1"
    return codec


def html_text(markup: str, name: str) -> tuple[str, tuple[tuple[int, str], ...]]:
    """The text of a page as it is read, and its headings: where each starts in the text, and its words.

    The title is the first heading. Scripts, styles, templates and what the page hides are left out.

    Raises:
        ValueError: markup that no parser takes.
    """
    with warnings.catch_warnings():
        # It warns of markup that resembles a file name, and of XHTML.
        warnings.simplefilter("ignore")
        try:
            # The parser of the standard library: lxml stops at 256 elements inside each other.
            soup = BeautifulSoup(_without_loose_ends(markup), "html.parser")
        except (ParserRejectedMarkup, RecursionError):
            raise ValueError(f"document: {name!r} is HTML that cannot be parsed; save the page's text") from None
    page = _Page()
    for element, entered in _walk(soup):
        page.take(element, entered)
    return page.text(), page.headings()


def _without_loose_ends(markup: str) -> str:
    """What is opened after the last end of its kind, as something shorter: the parser would look for it each time."""
    for opens, ends, instead in (
        ("<!--", ("-->", "--!>"), "&lt;!--"),
        # Browsers take these for comments that the next > ends.
        ("<![CDATA[", ("]]>",), "<!x["),
        ("<![", ("]>",), "<!x["),
        ("<", (">",), "&lt;"),
    ):
        last = max(markup.rfind(end) for end in ends) + 1
        markup = markup[:last] + markup[last:].replace(opens, instead)
    return markup


def _walk(root: Tag) -> Iterator[tuple[PageElement, bool]]:
    """Every element that is shown, and for tags once more (False) when they end; no recursion, pages nest deeply."""
    stack: list[tuple[Tag, Iterator[PageElement]]] = [(root, iter(root.contents))]
    while stack:
        tag, children = stack[-1]
        child = next(children, None)
        if child is None:
            stack.pop()
            yield tag, False
        elif not isinstance(child, Tag):
            yield child, True
        elif not _HIDDEN(child.name) and child.get("hidden") in (None, "until-found"):
            yield child, True
            stack.append((child, iter(child.contents)))


class _Page:
    """What has been written of a page so far, and what is owed before the next word."""

    def __init__(self) -> None:
        self._written: list[str] = []
        self._length = 0
        # Owed before the next word: newlines, else bars between cells, else a space; then a bullet.
        self._newlines, self._bars, self._space, self._bullet = 0, 0, False, False
        # White space of a <pre> that is written if more of it follows.
        self._held = ""
        self._pre, self._muted = 0, 0
        # Cells so far in each row that is open, and whether the last of them has no word yet.
        self._rows: list[int] = []
        self._cell_is_new = False
        # Where each heading that is open starts, once it has a word.
        self._open: list[int | None] = []
        self._found: list[tuple[int, int]] = []

    def take(self, element: PageElement, entered: bool) -> None:
        if isinstance(element, Tag):
            self._tag(element.name, entered)
        elif isinstance(element, NavigableString) and not isinstance(element, PreformattedString) and not self._muted:
            words = newlines(whole_characters(str(element))).replace("\xad", "")
            if self._pre:
                self._keep(words)
            else:
                self._flow(words)

    def text(self) -> str:
        return "".join(self._written)

    def headings(self) -> tuple[tuple[int, str], ...]:
        text = self.text()
        named = ((start, " ".join(text[start : min(end, start + 400)].split())) for start, end in sorted(self._found))
        return tuple((start, words) for start, words in named if words)

    def _tag(self, name: str, entered: bool) -> None:
        if name == "title" and (self._muted or (entered and self._length)):
            # That of a drawing: a page's own comes before all words.
            self._muted += 1 if entered else -1
            return
        if name == "br":
            self._break(min(2, self._newlines + entered))
        elif _PARAGRAPH(name):
            self._break(2)
        elif _LINE(name):
            self._break(1)
        elif _CELL(name):
            self._cell(entered)
        if name == "pre":
            self._pre += 1 if entered else -1
        elif name == "li":
            self._bullet = entered
        elif name == "tr":
            self._rows.append(0) if entered else self._rows.pop()
        elif _HEADING(name):
            self._heading(entered)

    def _heading(self, entered: bool) -> None:
        if entered:
            self._open.append(None)
        elif (start := self._open.pop()) is not None:
            self._found.append((start, self._length))

    def _cell(self, entered: bool) -> None:
        """Cells of a row share its line: what breaks lines at the start or the end of a cell does not count."""
        if not entered or (self._rows and self._rows[-1]):
            self._newlines, self._space, self._held = 0, True, ""
        if entered and self._rows:
            self._bars += self._rows[-1] > 0
            self._rows[-1] += 1
        self._cell_is_new = entered

    def _break(self, newlines: int) -> None:
        if not self._cell_is_new:
            self._newlines, self._bars = max(self._newlines, newlines), 0
        self._space, self._held = False, ""

    def _keep(self, text: str) -> None:
        """Words of a <pre>, with its white space; but none at its start or end, save what indents the first line."""
        body = text.rstrip()
        if body:
            whole = self._held + body
            if self._newlines or not self._length:
                words = whole.lstrip()
                whole = whole[: -len(words)].rpartition("\n")[2] + words
            self._settle()
            self._write(whole)
            self._held = ""
        self._held += text[len(body) :]

    def _flow(self, text: str) -> None:
        """Words in a line, where white space of any kind and length is one space."""
        text = _SPACE.sub(" ", text)
        self._space = self._space or text.startswith(" ")
        body = text.strip(" ")
        if body:
            self._settle()
            self._write(body)
            self._space = text.endswith(" ")

    def _settle(self) -> None:
        """Write what stands between the last word and the next."""
        if self._length:
            between = "\n" * self._newlines or " | " * self._bars or " " * self._space
            self._write(between)
        if self._bullet:
            self._write("- ")
        self._newlines, self._bars, self._space, self._bullet, self._cell_is_new = 0, 0, False, False, False
        for index in range(len(self._open) - 1, -1, -1):
            if self._open[index] is not None:
                break
            self._open[index] = self._length

    def _write(self, text: str) -> None:
        self._written.append(text)
        self._length += len(text)
