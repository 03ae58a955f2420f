"""Figure 4 of the paper, the numbers behind it, and Lemma 1 measured: run/analysis_xi.sh."""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from . import style
from .xi import Array, Problem, initial_slope, runs, total_variation

BETAS = np.arange(1, 100) / 100
CURVES = (0.2, 0.4, 0.6, 0.8)  # the betas of panel (a)
LINES = ("-", "--", "-.", ":", (0, (4, 1, 1, 1, 1, 1)), (0, (1, 2)))
LIMIT = 1e-6  # what the quadrature's error, and xi's, must stay below
SHRINKING = 10.0 ** -np.arange(1, 6)


def xi_rows(mu: float, vs: Sequence[float], betas: Array) -> list[dict]:
    """One row per (v, beta): xi, L at xi and at both ends, and the quadrature's errors.

    An error is the change at half the step: the sum's error falls by orders of magnitude with it.
    """
    rows = []
    for v, beta in product(vs, map(float, betas)):
        problem = Problem(mu, v, beta)
        points = np.array([problem.xi, 0.0, 1.0])
        at = problem.distance(points)
        rows.append({
            "mu": mu, "v": v, "beta": round(beta, 12), "xi": problem.xi,
            "interior": int(0 < problem.xi < 1), "l2_squared_at_xi": at[0],
            "l2_squared_gaussian": at[1], "l2_squared_prior": at[2],
            "error_l2_squared": float(np.abs(at - problem.refined.distance(points)).max()),
            "error_xi": abs(problem.xi - problem.refined.xi),
        })  # fmt: skip
    return rows


def lemma_rows(mu: float, vs: Sequence[float]) -> list[dict]:
    """Total variation from the reverse density to each limit as the limit is approached.

    `order` is the local exponent: log of the ratio to the row before, per factor 10.
    """
    rows = []
    for limit, v in product(("beta -> 0", "beta -> 1"), vs):
        before = None
        for distance in SHRINKING:
            beta = distance if limit == "beta -> 0" else 1 - distance
            problem = Problem(mu, v, float(beta))
            other = problem.gaussian if limit == "beta -> 0" else problem.prior
            tv = total_variation(problem, other)
            rows.append({
                "limit": limit, "mu": mu, "v": v, "distance_to_limit": float(distance),
                "total_variation": tv,
                "order": "" if before is None else float(np.log10(before / tv)),
                "xi": problem.xi,
                "xi_first_order": initial_slope(mu, v) * beta if beta < 0.5 else "",
            })  # fmt: skip
            before = tv
    return rows


def where_not_interior(mu: float) -> list[tuple[float, list[tuple[float, float]]]]:
    """For v = 0, 0.1, ..., 4: the runs of beta (in steps of 0.05) whose xi is 0 or 1."""
    betas = np.arange(1, 20) / 20
    found = []
    for v in np.arange(41) / 10:
        xi = np.array([Problem(mu, float(v), float(beta)).xi for beta in betas])
        at_end = (xi == 0) | (xi == 1)
        if at_end.any():
            found.append((float(v), runs(betas, at_end)))
    return found


def draw(mu: float, v: float, beta: float, rows: list[dict], path: Path, command: str) -> Path:
    """Panels (a), (b), (c) of Fig. 4."""
    fig, (a, b, c) = style.figure(1, 3, size=(12.5, 3.9))
    grid = np.linspace(0, 1, 201)
    for colour, line, curve in zip(style.PALETTE, LINES, CURVES, strict=False):
        problem = Problem(mu, v, curve)
        a.plot(grid, problem.distance(grid), color=colour, ls=line, label=rf"$\beta={curve:g}$")
        a.plot(problem.xi, problem.distance(problem.xi), "o", color=colour, mec="white", zorder=3)
    a.set(title=rf"(a) squared $L^2$ distance at $v = {v:g}$; dots: minima", ylim=(0, None),
          xlabel=r"$\xi$   (0: Gaussian, 1: prior)",
          ylabel=r"$\int (q^{(\xi)}_{u|v} - p^{(\beta)}_{u|v})^2 \, du$")  # fmt: skip

    for index, one in enumerate(dict.fromkeys(row["v"] for row in rows)):
        colour, line = style.PALETTE[index % len(style.PALETTE)], LINES[index % len(LINES)]
        betas, xis = np.array([(r["beta"], r["xi"]) for r in rows if r["v"] == one]).T
        b.plot([0, *betas, 1], [0, *xis, 1], color=colour, ls=line, label=f"$v={one:g}$")
        ends = (xis == 0) | (xis == 1)
        if ends.any():  # an empty line that is not clipped upsets the layout
            b.plot(betas[ends], xis[ends], ".", color=colour, ms=7, zorder=3, clip_on=False)
    b.set(title=rf"(b) $\xi(\beta)$ at $\mu = {mu:g}$; dots: exactly 0 or 1", xlabel=r"$\beta$",
          ylabel=r"$\xi(\beta)$", xlim=(0, 1), ylim=(-0.02, 1.02))  # fmt: skip

    problem = Problem(mu, v, beta)
    xi = problem.xi
    for density, colour, line, width, label in (
        (problem.reverse, style.BLACK, "-", 2.6, r"true $p^{(\beta)}_{u|v}$"),
        (problem.gaussian, style.BLUE, "--", 1.6, r"$\beta \to 0$: Gaussian"),
        (problem.prior, style.GREEN, "-.", 1.6, r"$\beta \to 1$: prior $p_u$"),
        (problem.mixture(xi), style.RED, (0, (4, 1)), 1.9, rf"$q^{{(\xi)}}$, $\xi={xi:.3f}$"),
    ):
        c.plot(problem.u, density, color=colour, ls=line, lw=width, label=label)
    c.set(title=rf"(c) densities at $v = {v:g}$, $\beta = {beta:g}$", xlabel="$u$",
          ylabel="density", xlim=(-mu - 3, mu + 3),
          ylim=(0, 1.28 * max(problem.reverse.max(), problem.gaussian.max())))  # fmt: skip
    a.legend()
    b.legend()
    c.legend(loc="upper center", ncols=2, columnspacing=1.2)
    fig.tight_layout(rect=(0, 0.025, 1, 1))
    return style.save(fig, path, command)


def report(problem: Problem, lemma: list[dict]) -> None:
    """The findings, in a few lines."""
    at_xi, at_0, at_1 = problem.distance(np.array([problem.xi, 0.0, 1.0]))
    print(f"mu = {problem.mu:g}, v = {problem.v:g}, beta = {problem.beta:g}: xi = {problem.xi:.5f}")
    print(f"  squared L2 distance  at xi {at_xi:.5f}   Gaussian {at_0:.5f}   prior {at_1:.5f}")
    for limit, other in (("beta -> 0", "Gaussian"), ("beta -> 1", "prior")):
        last = [r for r in lemma if (r["limit"], r["distance_to_limit"]) == (limit, SHRINKING[-1])]
        tv, order = max((row["total_variation"], row["order"]) for row in last)
        print(
            f"Lemma 1, {limit}: total variation to the {other} {tv:.1e} at {SHRINKING[-1]:.0e} from"
            f" the limit (largest over v), falling with its power {order:.2f}"
        )
    ends = where_not_interior(problem.mu)
    if not ends:
        print("0 < xi < 1 at every v in 0, 0.1, ..., 4 and beta in 0.05, 0.1, ..., 0.95")
        return
    print("0 < xi < 1 fails (xi is 0 or 1) at these v and beta, of v to 4 and beta by 0.05:")
    for v, intervals in ends:
        spans = ", ".join(f"{a:g}" if a == b else f"{a:g} to {b:g}" for a, b in intervals)
        print(f"  v = {v:.1f}: beta {spans}")
    print("  and at -v likewise; everywhere else on that grid it holds")


def xi(args: argparse.Namespace, command: str) -> list[Path]:
    """xi.csv, lemma1.csv and fig4.png; raises ValueError if the quadrature's error is too large."""
    for v, beta in product((args.v, *args.vs), (args.beta, BETAS[0], BETAS[-1])):
        _ = Problem(args.mu, v, beta).u  # refuses what cannot be computed
    rows, lemma = xi_rows(args.mu, args.vs, BETAS), lemma_rows(args.mu, args.vs)
    report(Problem(args.mu, args.v, args.beta), lemma)
    errors = [max(row[name] for row in rows) for name in ("error_l2_squared", "error_xi")]
    print(f"largest change at half the step: squared L2 {errors[0]:.1e}, xi {errors[1]:.1e}")
    written = [
        style.write_csv(args.out / "xi.csv", rows),
        style.write_csv(args.out / "lemma1.csv", lemma),
        draw(args.mu, args.v, args.beta, rows, args.out / "fig4.png", command),
    ]
    if max(errors) > LIMIT:
        raise ValueError(f"the quadrature's error exceeds {LIMIT:.0e}; see {written[0]}")
    return written
