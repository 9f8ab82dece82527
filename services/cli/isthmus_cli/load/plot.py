"""A run as a picture: the share of requests below each latency, and tokens over time."""

from __future__ import annotations

from pathlib import Path

from isthmus_cli.load.histogram import Histogram
from isthmus_cli.load.report import Report
from isthmus_shared.errors import ConfigInvalid, Unavailable

WIDTH_IN, HEIGHT_IN = 13.0, 4.2


def draw(report: Report, path: Path, title: str) -> None:
    """Writes the format that the name ends in. Raises `Unavailable` without matplotlib (the extra `bench`), and
    `ConfigInvalid` for a place or a format that can't be written."""
    try:
        import matplotlib
    except ImportError as error:
        raise Unavailable("a plot needs matplotlib", todo="pip install 'isthmus[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (below, over) = pyplot.subplots(1, 2, figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    for name, histogram in (("TTFT", report.ttft), ("ITL", report.itl), ("end to end", report.e2e)):
        bounds_ms, shares = _cumulated(histogram)
        if bounds_ms:
            below.step(bounds_ms, shares, where="post", label=name)
    below.set_xscale("log")
    below.set_xlabel("milliseconds")
    below.set_ylabel("share at or below")
    below.set_title(title, fontsize=9)
    below.legend()
    seconds = range(max(report.per_second, default=0) + 1)
    over.plot(list(seconds), [report.per_second[second] for second in seconds], drawstyle="steps-post")
    over.set_xlabel("seconds")
    over.set_ylabel("output tokens of answers that ended in it")
    over.set_ylim(bottom=0)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"{path} cannot be written", why=str(error), todo="end it in .png or .svg") from error
    finally:
        pyplot.close(figure)


def _cumulated(histogram: Histogram) -> tuple[list[float], list[float]]:
    bounds_ms: list[float] = []
    shares: list[float] = []
    seen = 0
    for bound_s, count in histogram.buckets():
        seen += count
        bounds_ms.append(bound_s * 1e3)
        shares.append(seen / histogram.count)
    return bounds_ms, shares
