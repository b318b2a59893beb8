"""Draw the pictures of `how-it-works.md`.

    python docs/make_pictures.py

Needs matplotlib (`pip install sgl-ssd[docs]`). The figures in them are the ones named in the text:
pictures of an idea, not measurements.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

IMAGES = Path(__file__).with_name("images")
TARGET, DRAFT, RED, INK, SOFT = "#3b6fd4", "#3f9a63", "#cf4a3f", "#1d2126", "#8a929b"
VERIFY_MS, STEP_MS, K = 12.0, 1.8, 4


def _bar(axes: Axes, row: float, start: float, length: float, colour: str, text: str = "") -> None:
    axes.barh(row, length, 0.62, left=start, color=colour, edgecolor="white", linewidth=0.8)
    if text:
        axes.text(
            start + length / 2, row, text, ha="center", va="center", color="white", fontsize=8,
            clip_on=True,
        )  # fmt: skip


def timelines() -> None:
    """Three ways to decode, on one time axis: each row is a GPU."""
    figure, axes = plt.subplots(figsize=(7.2, 2.9), layout="constrained")
    end = 51.2
    rows = {
        "plain decoding\ntarget": 4.2,
        "speculative decoding\none GPU": 2.9,
        "SSD\ntarget": 1.6,
        "SSD\ndraft": 0.8,
    }
    at = 0.0
    while at < end:
        _bar(axes, rows["plain decoding\ntarget"], at, VERIFY_MS, TARGET, "1 token")
        at += VERIFY_MS
    at = 0.0
    while at < end:
        for _ in range(K):
            _bar(axes, rows["speculative decoding\none GPU"], at, STEP_MS, DRAFT)
            at += STEP_MS
        _bar(axes, rows["speculative decoding\none GPU"], at, VERIFY_MS, TARGET, "verify")
        at += VERIFY_MS
    at, wire = 0.0, 0.8
    while at < end:
        _bar(axes, rows["SSD\ntarget"], at, VERIFY_MS, TARGET, "verify")
        for step in range(K + 1):
            _bar(axes, rows["SSD\ndraft"], at + wire + step * STEP_MS, STEP_MS, DRAFT)
        at += VERIFY_MS + wire
    axes.set_yticks(list(rows.values()), list(rows), fontsize=8, color=INK)
    axes.set_xlim(0, end)
    axes.set_xlabel("milliseconds", fontsize=8, color=SOFT)
    axes.tick_params(axis="x", labelsize=8, colors=SOFT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _save(figure, "timelines")


def tree() -> None:
    """The speculation cache of one session: the chain in flight, and a branch for each outcome."""
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    trunk = ["b", "s1", "s2", "s3"]
    tokens = [["t", "u"], ["v", "w"], ["x", "y"], ["z", "q"]]
    hit = (2, 1)
    for k, name in enumerate(trunk):
        if k:
            axes.plot([k - 1, k], [0, 0], color=INK, linewidth=1.4, zorder=1)
        for f, root in enumerate(tokens[k]):
            depth = -(f + 1)
            colour = DRAFT if (k, f) == hit else SOFT
            axes.plot([k, k + 0.28], [0, depth * 0.8], color=colour, linewidth=1.2, zorder=1)
            for i in range(3):
                x = k + 0.28 + 0.22 * i
                label = root if i == 0 else ""
                _node(axes, x, depth * 0.8, label, colour, 9 if i == 0 else 6)
                if i:
                    axes.plot([x - 0.22, x], [depth * 0.8] * 2, color=colour, zorder=1)
        _node(axes, k, 0, name, TARGET, 12)
        axes.text(k, 0.42, f"k = {k}", ha="center", fontsize=8, color=SOFT)
    axes.text(-0.35, 0, "committed\ntext", ha="right", va="center", fontsize=8, color=INK)
    axes.annotate(
        "the target keeps s1, s2 and says y: a hit,\nand these are the next drafts",
        (2.5, -1.6), (2.5, -2.55), fontsize=8, color=DRAFT, ha="center",
        arrowprops={"arrowstyle": "->", "color": DRAFT, "shrinkB": 9},
    )  # fmt: skip
    axes.text(3.3, 0, "the chain that is being verified", va="center", fontsize=8, color=INK)
    axes.text(3.95, -1.2, "drafted ahead\nmeanwhile", va="center", fontsize=8, color=SOFT)
    axes.set_xlim(-1.0, 5.2)
    axes.set_ylim(-2.75, 0.7)
    axes.axis("off")
    _save(figure, "tree")


def _node(axes: Axes, x: float, y: float, text: str, colour: str, size: float) -> None:
    axes.plot(x, y, "o", markersize=size * 1.7, color=colour, zorder=2)
    axes.text(x, y, text, ha="center", va="center", color="white", fontsize=size * 0.78, zorder=3)


def tokens_a_round() -> None:
    """(1 - a^(K+1)) / (1 - a): what K brings for a draft that is right with probability a."""
    figure, axes = plt.subplots(figsize=(5.6, 2.9), layout="constrained")
    lookaheads = range(1, 13)
    for acceptance, colour in ((0.9, TARGET), (0.8, DRAFT), (0.6, RED), (0.4, SOFT)):
        tokens = [sum(acceptance**i for i in range(k + 1)) for k in lookaheads]
        axes.plot(lookaheads, tokens, marker="o", markersize=3, color=colour)
        axes.text(12.2, tokens[-1], f"a = {acceptance}", va="center", fontsize=8, color=colour)
    axes.set_xlim(0.7, 13.9)
    axes.set_ylim(1, None)
    axes.set_xlabel("K, drafts a round", fontsize=8, color=SOFT)
    axes.set_ylabel("tokens a round", fontsize=8, color=SOFT)
    axes.tick_params(labelsize=8, colors=SOFT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _save(figure, "tokens-a-round")


def _save(figure: plt.Figure, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    # No date and no version in the file: drawn again, it is the same.
    figure.savefig(IMAGES / f"{name}.png", dpi=160, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    timelines()
    tree()
    tokens_a_round()
