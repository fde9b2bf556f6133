"""What the measurements say, in sentences: the titles of the pictures and the captions of the page."""

from __future__ import annotations

from theodolite.report.figures import (
    Summary,
    percent,
    perplexity,
    perplexity_in,
    recall_at,
    recall_columns,
    recommended,
    shipped,
    shortened,
    span,
    tokens,
)

AS_SHIPPED = "as shipped"


def label(name: str) -> str:
    """A scaling's name as a reader knows it."""
    return AS_SHIPPED if name == "none" else shortened(name, 22)


def perplexity_title(summary: Summary) -> str:
    """What perplexity by position found, in the last band, where every way of reading it can be compared."""
    own, best, window = shipped(summary), recommended(summary), summary["truncated_window"]
    ways = []
    if own:
        ways.append((AS_SHIPPED, own["bands"]))
    if best and best is not own:
        ways.append((f"with {label(best['name'])}", best["bands"]))
    if window:
        ways.append((f"truncated to {tokens(window['window'])}", window["bands"]))
    edges = max(((band["from"], band["to"]) for _, bands in ways for band in bands), default=None, key=lambda e: e[1])
    if edges is None:
        return "Perplexity by position"
    values = [(how, perplexity_in(bands, edges)) for how, bands in ways]
    said = ", ".join(f"{perplexity(value)} {how}" for how, value in values if value is not None)
    return f"Perplexity at {span(edges)} tokens: {said}"


def reach_title(summary: Summary) -> str:
    """What the reach found."""
    own, best = shipped(summary), recommended(summary)
    if not (own and own["reach"]):
        return "How far back each scaling copies"
    within = f"{tokens(summary['to'])} tokens"
    far = "from no distance tried" if own["reaches"] is None else f"from {tokens(own['reaches'])} tokens back"
    if best is None or best is own or not best["reach"]:
        return f"In {within}, as shipped it copies {far}"
    farther = "from no distance tried" if best["reaches"] is None else f"from {tokens(best['reaches'])} tokens back"
    if farther == far:
        return f"In {within}, as shipped and with {label(best['name'])} it copies {far}"
    return f"In {within}, as shipped it copies {far}; with {label(best['name'])} {farther}"


def recall_title(summary: Summary) -> str:
    """What recall found at the longest length."""
    lengths = recall_columns(summary)
    if not lengths:
        return "Recall by length and depth"
    length, own, best = lengths[-1], shipped(summary), recommended(summary)
    known = [s for s in (own, best) if s is not None and recall_at(s, length) is not None]
    if not known:
        return f"Recall at {tokens(length)} tokens"
    alone = percent(recall_at(known[-1], length, "accuracy_alone"))
    parts = []
    for scaling in known if own is not best else known[:1]:
        how = AS_SHIPPED if scaling is own else f"with {label(scaling['name'])}"
        parts.append(f"{percent(recall_at(scaling, length))} {how}")
    return f"Recall at {tokens(length)} tokens: {', '.join(parts)} ({alone} can be guessed)"


def wavelengths_title(summary: Summary) -> str:
    """What the scaling does to the pairs."""
    best = recommended(summary)
    if best is None or best["name"] == "none":
        return "Tokens that each pair of channels takes for a full turn"
    pairs = [(a, b) for a, b in zip(best["inv_freq"]["plain"], best["inv_freq"]["scaled"], strict=True) if a and b]
    if not pairs:
        return "No pair of channels turns"
    ratios = [before / after for before, after in pairs]
    kept = sum(1 for ratio in ratios if abs(ratio - 1) < 0.005)
    most = max(ratios)
    if kept == len(ratios):
        instead = ": it maps distances instead" if best.get("relative") else ""
        return f"{label(best['name'])} leaves every pair as it was{instead}"
    leaves = f"leaves {kept} of {len(ratios)} pairs as they were, and " if kept else ""
    return f"{label(best['name'])} {leaves}stretches the slowest up to {most:.3g} times"


CAPTIONS = {
    "perplexity": "Lower is better: each point is the perplexity of one band of positions, with intervals shaded. A "
    "line that climbs past the dotted mark breaks beyond the trained length; dashed grey is the shipped model that "
    "sees only the last tokens of its window, and a line that stays above it predicts worse than cutting the text.",
    "reach": "Higher is better: a passage is started again that many tokens later, and the share of its next tokens "
    "copied right is shown, first with the short prefill spread over the whole length, then in the unspread sweep far "
    "past the trained length, which shows where the positions themselves give out.",
    "recall": "Darker is better: each cell is the percentage of tokens recalled from a passage at that depth (0 is the "
    "start) once that many tokens were read; white is no better than guessing, and what can be guessed is stated over "
    "each map. Rows above the line are past the trained length.",
    "wavelengths": "First, the tokens that each pair of channels takes for a full turn: pairs above the dotted mark "
    "never turn once within the trained length. Then, how many times longer each scaling makes that turn; a map of "
    "distances turns as the model does.",
}
