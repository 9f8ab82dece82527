"""The figures as a picture: throughput and CPU by contender, inter-token latency under bursts."""

from __future__ import annotations

from pathlib import Path

from isthmus_kvrelay.bench.relay_bench import RelayBench
from isthmus_kvrelay.bench.report import BULK
from isthmus_kvrelay.bench.transfer import median
from isthmus_shared.errors import Unavailable

WIDTH_IN, HEIGHT_IN = 14.0, 4.4


def draw(bench: RelayBench, path: Path) -> None:
    """Writes the format that the name ends in. Raises `Unavailable` without matplotlib (the extra `bench`)."""
    try:
        import matplotlib
    except ImportError as error:
        raise Unavailable("a plot needs matplotlib", todo="pip install 'isthmus[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, cpu, latency) = pyplot.subplots(1, 3, figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    names = list(bench.transfers)
    for axes, field, title in ((rates, "gb_per_s", "GB/s"), (cpu, "cpu_s_per_gb", "CPU seconds per GB")):
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            values = [median(bench.transfers[name], workload, field) or 0.0 for workload in BULK]
            axes.bar([at + number * width for at in range(len(BULK))], values, width, label=name)
        axes.set_xticks([at + 0.4 - width / 2 for at in range(len(BULK))], BULK, fontsize=7)
        axes.set_title(title)
    figure.legend(*rates.get_legend_handles_labels(), loc="outside lower left", ncols=len(names), fontsize=7)
    variants = list(bench.bursts)
    for number, when in enumerate(("quiet", "burst")):
        values = [getattr(bench.bursts[name], f"{when}_p99_s") * 1e3 for name in variants]
        label = "alone" if when == "quiet" else "under bursts"
        latency.barh([at + number * 0.4 for at in range(len(variants))], values, 0.4, label=label)
    latency.set_yticks([at + 0.2 for at in range(len(variants))], variants, fontsize=8)
    latency.invert_yaxis()  # the first one on top
    latency.set_title("decode's inter-token latency, p99 ms")
    latency.legend(fontsize=7)
    figure.savefig(path)
    pyplot.close(figure)
