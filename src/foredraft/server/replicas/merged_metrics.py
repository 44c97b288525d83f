"""The metrics of all replicas on one page, each with its replica's name, and the front's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from foredraft.server.replicas.replica_worker import ReplicaReport

FRONT = "front"
"""The replica label of the front's own metrics."""

_COUNTED_IN_FRONT = "foredraft:http_requests"
"""Counted by the front only: the replicas would count the same responses again."""


class FrontMetrics:
    """http: responses. lost: requests whose replica ended, by outcome: retried on another replica, broken off in mid-response, or
    failed."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.http = Counter(_COUNTED_IN_FRONT, "HTTP responses", ("route", "status"), registry=self._registry)
        self.lost = Counter(
            "foredraft:replica_lost_requests",
            "Requests whose replica ended before they did",
            ("outcome",),
            registry=self._registry,
        )

    def text(self, reports: Sequence[ReplicaReport]) -> bytes:
        """In Prometheus' text format."""
        merged = CollectorRegistry()
        merged.register(_Merged(self._registry, reports))
        return generate_latest(merged)


class _Merged(Collector):
    """One family for each name, with the samples of all replicas. They are not summed: the counts of a replica vanish when it ends,
    and Prometheus can handle a series that ends, but not a counter that falls."""

    def __init__(self, front: CollectorRegistry, reports: Sequence[ReplicaReport]) -> None:
        self._front = front
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        _add(families, FRONT, self._front.collect())
        for report in self._reports:
            parsed = text_string_to_metric_families(report.text.decode())
            kept = (family for family in parsed if not family.name.startswith(_COUNTED_IN_FRONT))
            _add(families, report.replica, kept)
        yield from families.values()
        yield GaugeMetricFamily("foredraft:num_replicas", "Replicas that answer", value=len(self._reports))
        info = GaugeMetricFamily("foredraft:replica_info", "Where a replica runs", labels=("replica", "host", "pid"))
        for report in self._reports:
            info.add_metric((report.replica, report.host, str(report.pid)), 1)
        yield info


def _add(families: dict[str, Metric], replica: str, added: Iterable[Metric]) -> None:
    for family in added:
        target = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            target.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
