"""The pictures of the pages in docs/encodings, drawn by the library itself: `python -m docs.draw` draws them all."""
