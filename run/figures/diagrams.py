"""Figures 2 and 3 of the paper, drawn: the graphical model and what the discriminator does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.patches import Circle, FancyArrowPatch

from . import style

RADIUS = 0.36


def _canvas(size: tuple[float, float], limits: tuple[float, float, float, float]):
    fig = style.plt.figure(figsize=size)
    ax = fig.add_axes((0, 0.03, 1, 0.97))
    ax.set(xlim=limits[:2], ylim=limits[2:], aspect="equal")
    ax.axis("off")
    return fig, ax


def _node(ax, x: float, y: float, text: str, observed: bool) -> None:
    face = "#D9E8F5" if observed else "white"
    ax.add_patch(Circle((x, y), RADIUS, facecolor=face, edgecolor="black", lw=1.4, zorder=3))
    ax.text(x, y, text, ha="center", va="center", fontsize=12, zorder=4)


def _arrow(ax, start, end, colour="black", bend=0.0, line="-", width=1.5, shrink=0.0) -> None:
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=13,
            color=colour,
            lw=width,
            ls=line,
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=shrink,
            shrinkB=shrink,
            zorder=2,
        )  # fmt: skip
    )


def draw_graphical_model(path: Path, command: str) -> Path:
    """States x_T ... x_0, each with its observation y: whether it is on the real manifold."""
    fig, ax = _canvas((7.6, 3.0), (-0.7, 9.9, -1.1, 3.15))
    nodes = [(0.0, "T"), (3.0, "t"), (6.2, "t-1"), (9.2, "0")]
    top, bottom = 1.85, 0.0
    for x, index in nodes:
        _node(ax, x, top, rf"$x_{{{index}}}$", observed=False)
        _node(ax, x, bottom, rf"$y_{{{index}}}$", observed=True)
        _arrow(ax, (x, top - RADIUS), (x, bottom + RADIUS), style.RED)
    for left, right in ((0.0, 3.0), (3.0, 6.2), (6.2, 9.2)):
        middle = (left + right) / 2
        if (left, right) == (3.0, 6.2):
            _arrow(ax, (left + RADIUS, top + 0.08), (right - RADIUS, top + 0.08), style.BLUE, -0.15)
            _arrow(ax, (right - RADIUS, top - 0.08), (left + RADIUS, top - 0.08), style.GREY,
                   -0.15, "--")  # fmt: skip
            continue
        ax.text(middle, top, r"$\cdots$", ha="center", va="center", fontsize=15)
        _arrow(ax, (left + RADIUS, top), (middle - 0.35, top), style.BLUE)
        _arrow(ax, (middle + 0.35, top), (right - RADIUS, top), style.BLUE)
    ax.text(4.6, top + 0.58, r"denoising  $p_\theta(x_{t-1} \mid x_t)$", color=style.BLUE,
            ha="center", fontsize=10)  # fmt: skip
    ax.text(4.6, top - 0.62, r"diffusion  $q(x_t \mid x_{t-1})$", color=style.GREY, ha="center",
            va="center", fontsize=10)  # fmt: skip
    ax.text(3.15, 0.68, r"$p(y_t \mid x_t) = \mathrm{Ber}(D(f(x_t)))$", color=style.RED,
            ha="left", va="center", fontsize=10)  # fmt: skip
    question = "observation: is the state on the manifold of real data at its noise level?"
    ax.text(4.6, -0.72, question, ha="center", va="center", fontsize=9)
    ax.text(0.0, top + 0.58, "noise", ha="center", fontsize=9)
    ax.text(9.2, top + 0.58, "image", ha="center", fontsize=9)
    return style.save(fig, path, command)


def draw_discriminator_role(path: Path, command: str) -> Path:
    """One large step from x_t: the baseline misses the states at t - s, D pulls ours to them."""
    fig, ax = _canvas((6.4, 3.5), (-0.1, 10.3, -0.15, 5.5))
    x = np.linspace(0.2, 9.4, 200)

    def upper(x):
        return 4.7 - 0.045 * (x - 3.5) ** 2

    def lower(x):
        return 1.55 + 0.75 * np.sin(0.52 * x - 0.3)

    for curve, name in (
        (upper, r"states $x_t \sim q_t$"),
        (lower, r"states $x_{t-s} \sim q_{t-s}$"),
    ):
        ax.fill_between(x, curve(x) - 0.22, curve(x) + 0.22, color=style.SKY, alpha=0.25, lw=0)
        ax.plot(x, curve(x), color=style.BLUE, lw=1.5)
        ax.text(0.2, curve(0.2) - 0.6, name, color=style.BLUE, ha="left", va="center", fontsize=10)

    start = np.array([2.2, upper(2.2)])
    real = np.array([5.2, lower(5.2)])
    ours = np.array([6.35, lower(6.35) + 0.12])
    base = np.array([7.9, 2.75])
    _arrow(ax, start, base, style.GREY, -0.12, width=1.8, shrink=4)
    _arrow(ax, start, ours, style.RED, 0.12, width=1.8, shrink=4)
    _arrow(ax, start, real, style.BLACK, 0.3, "--", width=1.2, shrink=4)
    _arrow(ax, base, ours, style.ORANGE, 0.0, width=2.6, shrink=6)
    for point, colour, text, offset, align in (
        (start, style.BLACK, r"$x_t$", (-0.05, 0.42), "center"),
        (real, style.BLACK, r"$x_{t-s}$ (real)", (-0.1, -0.5), "center"),
        (ours, style.RED, r"$\hat x^{\,\theta_{ours}}_{t-s}$", (0.15, -0.62), "center"),
        (base, style.GREY, r"$\hat x^{\,\theta_{base}}_{t-s}$", (0.25, 0.12), "left"),
    ):
        ax.plot(*point, "o", color=colour, ms=7, zorder=5)
        ax.text(*(point + offset), text, color=colour, ha=align, va="center", fontsize=12)
    ax.text(7.55, 1.83, r"$-\gamma \log D_\phi(\hat x_{t-s}, t, s)$", color="#9A6A00", ha="left",
            va="center", fontsize=10)  # fmt: skip
    ax.text(5.35, 3.2, "one solver step\n" r"$\Phi(x_t, t, s; \theta)$", ha="center", va="center",
            fontsize=9)  # fmt: skip
    return style.save(fig, path, command)
