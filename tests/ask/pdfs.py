"""PDF files written by hand, byte by byte."""

from __future__ import annotations


def pdf(pages: list[str | None], *, labels: str = "") -> bytes:
    """A PDF whose pages have these lines of ASCII, or a drawing for None; `labels` is its /PageLabels."""
    objects = ["<< /Type /Catalog /Pages 2 0 R" + (f" /PageLabels {labels}" if labels else "") + " >>", ""]
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>")
    kids = []
    for page in pages:
        if page is None:
            drawn = "0 0 100 100 re f"
        else:
            shown = " T* ".join(f"({line}) Tj" for line in page.split("\n"))
            drawn = f"BT /F1 12 Tf 14 TL 72 720 Td {shown} ET"
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
        kids.append(f"{len(objects) + 1} 0 R")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {len(objects)} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
    objects[1] = f"<< /Type /Pages /Count {len(pages)} /Kids [{' '.join(kids)}] >>"
    out, starts = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        starts.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("ascii")
    table = "".join(f"{start:010} 00000 n \n" for start in starts)
    end = (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n"
    )
    return out + f"{end}startxref\n{len(out)}\n%%EOF\n".encode("ascii")
