"""A Prometheus histogram that is cheap to observe. prometheus_client's own takes a lock and walks its buckets each
time, which is felt where every token of every stream is observed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """One histogram with fixed labels, for one thread. Buckets include their upper bound, as Prometheus has them."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Mapping[str, str]) -> None:
        self._name, self._text, self._labels = name, text, dict(labels)
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        edges = map(floatToGoString, (*self._bounds, float("inf")))
        buckets = list(zip(edges, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family
