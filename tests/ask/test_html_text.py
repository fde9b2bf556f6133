"""Pages as a browser shows them."""

from __future__ import annotations

import pytest

from tests.ask.places import place

PAGE = """<!DOCTYPE html><html><head><title>My &amp; page</title><meta name=x content=y><style>p {}</style>
<script>var a = "<p>no</p>"</script><base href=x></head><body><h1>One <em>big</em>&nbsp;thing</h1>
<p>Hello <b>wor</b>ld &eacute;&#8212;<i>a</i> <i>b</i><br>next<br><br>third<!-- no --><p>para
  two</p><ul><li>one<li><p>two</p></ul><table><tr><th>name<th>number</tr>
<tr><td>cell1</td><td><p>cell2</p></td><td></td><td>cell4</td></tr></table>
<pre>
  def f():

      return <b>1</b>

</pre>after<div hidden>no</div><noscript>no</noscript><template>no</template>
<svg><title>no</title><text>drawn</text></svg><h2>Two</h2><div>soft&shy;ly<div>inner</div>outer</div>
<select><option>A<option>B</select></body></html>"""
WORDS = """My & page

One big thing

Hello world é—a b
next

third

para two

- one

- two

name | number
cell1 | cell2 |  | cell4

  def f():

      return 1

after drawn

Two

softly
inner
outer
A
B"""


class TestHtml:
    """What a browser shows, in lines; a model that reads glued words answers about words that are not there."""

    def test_a_page(self, read):
        document = read("a.html", PAGE)
        assert document.text == WORDS
        assert document.headings == tuple(
            (WORDS.index(words), words) for words in ("My & page", "One big thing", "Two")
        )
        assert place(document, "cell2") == "under 'One big thing'"
        assert place(document, "third\n\npara") == "under 'One big thing'"
        assert place(document, "inner") == "under 'Two'"

    @pytest.mark.parametrize("name", ["a.htm", "a.XHTML", "a.txt", "a", "a.pdf"])
    def test_known_by_its_start(self, read, name):
        page = "<p>words</p>"
        starts = (
            "<!doctype html>",
            " \n<HTML lang=en>",
            '<?xml version="1.0"?>\n<!-- saved --><!-- b -->\n<!DOCTYPE HTML>',
        )
        for start in starts:
            assert read(name, start + page).text == "words"
        assert read(name, "\ufeff<html>" + page).text == "words"
        assert read(name, ("<html>" + page).encode("utf-16")).text == "words"

    @pytest.mark.parametrize("start", ["<htmlx>", "text <html>", "<!doctype svg>"])
    def test_other_starts_are_plain_text(self, read, start):
        assert read("a.txt", start).text == start

    def test_no_headings(self, read):
        document = read("a.html", f"<p>{'x' * 50}<p>{'y' * 48}")
        assert (document.place(0, 1), document.place(52, 60)) == ("0 % of the way in", "52 % of the way in")
        before = read("a.html", "<p>early<h1>Late</h1><p>end")
        assert (place(before, "early"), place(before, "end")) == ("before 'Late'", "under 'Late'")

    @pytest.mark.parametrize(
        ("named", "written"),
        [
            ("iso-8859-1", "cp1252"),
            ("windows-1251", "cp1251"),
            ("gb2312", "gb18030"),
            ("shift_jis", "cp932"),
            ("utf-16", "utf-8"),
            ("nonsense", "utf-8"),
            ("rot13", "utf-8"),
        ],
    )
    def test_what_the_page_says_of_its_encoding(self, read, named, written):
        words = {"cp1252": "Zürich €", "cp1251": "Москва", "gb18030": "東京 €㐀", "cp932": "東京①"}.get(written, "é東")
        for meta in (f"<meta charset={named}>", f"<meta http-equiv=x content='text/html; charset={named}'>"):
            assert read("a.html", f"<html>{meta}<p>{words}".encode(written)).text == words
        page = f"<?xml version='1.0' encoding='{named}'?><html><p>{words}</p></html>"
        assert read("a.xhtml", page.encode(written)).text == words

    def test_what_goes_before_it(self, read):
        page = "<html><meta charset=iso-8859-1><p>é東"
        assert read("a.html", page.encode("utf-8-sig")).text == "é東"
        assert read("a.html", page.encode("utf-8"), encoding="utf-8").text == "é東"

    def test_bytes_that_have_no_character(self, read):
        assert read("a.html", b"<html><meta charset=latin1><p>a\x81b").text == "a\x81b"

    def test_not_what_it_says(self, read):
        with pytest.raises(ValueError, match=r"'a.html' is not utf-8 \(byte 30\)"):
            read("a.html", "<html><meta charset=utf-8><p>aé".encode("cp1252"))

    @pytest.mark.parametrize(
        ("markup", "words"),
        [
            ("<p>a<p>b<div>c<p>d", "a\n\nb\nc\n\nd"),
            ("<table><tr><td>a<td>b<tr><td>c</table>d", "a | b\nc\n\nd"),
            ("<table><tr><td>a<td><table><tr><td>b<td>c</table><td>d</table>", "a | b | c | d"),
            ("<table><tr><td>a<p>b</p></td><td>c</td></tr></table>", "a\n\nb | c"),
            ("<dl><dt>a<dd>b</dl>", "a\nb"),
            ("a<span>b</span>  <span> c</span>\n", "ab c"),
            ("<pre>a</pre><pre>\n\n  b\n</pre>", "a\n\n  b"),
            ("<pre>a\n<span>  b</span>\r\n\n<i>c</i></pre>", "a\n  b\n\nc"),
            ("<title></title><p>a", "a"),
            ("<p>a &lt;b&gt; &#x6771;&#xD800;&#xD83D;", "a <b> 東\ufffd\ufffd"),
            ("<p>a < b", "a < b"),
            ("<p>a<!-- b", "a<!-- b"),
            ("<p>a<![CDATA[ x ]]>b", "ab"),
            ("<p>a<![CDATA[ x <b>b</b>", "ab"),
            ("<p>a<![CDATA[ x <b>b</b> ]>", "ab ]>"),
            ("<p>a<![endif]-->b<p>c", "ab\n\nc"),
            ("<p>a<![if !IE]>b<![endif]>c", "abc"),
            ("<ruby>東<rp>(</rp><rt>tō</rt><rp>)</rp></ruby>", "東(tō)"),
        ],
    )
    def test_what_pages_do(self, read, markup, words):
        assert read("a.html", markup).text == words

    @pytest.mark.parametrize("tag", ["div", "b", "ul><li", "h1", "table><tr><td", "pre", "title", "blockquote"])
    def test_deeper_than_any_recursion(self, read, tag):
        depth = 3000
        closing = "".join(f"</{name}>" for name in reversed(tag.split("><")))
        for markup in (f"<{tag}>" * depth + "words" + closing * depth, f"<{tag}>" * depth + "words"):
            assert read("a.html", markup).text.endswith("words")

    @pytest.mark.parametrize("opens", ["<a ", '<a b="', "<!--", "<![", "<?", "</a ", "<"])
    def test_what_never_ends(self, read, opens):
        # A parser that looks for the end from each of them takes minutes.
        assert len(read("a.html", "<p>" + opens * 20_000).text) >= 20_000

    @pytest.mark.parametrize("opens", ["<!--", "<![CDATA[", "<![if", "<?"])
    def test_what_never_ends_among_tags(self, read, opens):
        assert read("a.html", "<p>" + f"{opens}<b>b</b>" * 10_000 + "words").text.endswith("words")
