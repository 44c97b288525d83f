"""The metrics of all replicas on one page, each with its replica's name; and what is known only in front."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from foredraft.server.replicas.worker import Report

FRONT = "front"
"""The label of what is counted in front."""

_COUNTED_IN_FRONT = "foredraft:http_requests"
"""Answers as clients see them; a replica's own would count them twice."""


class FrontMetrics:
    """http: answers. lost: requests whose replica ended: retried on another, broken off while they were sent, or failed."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.http = Counter(_COUNTED_IN_FRONT, "Answers", ("route", "status"), registry=self._registry)
        self.lost = Counter(
            "foredraft:replica_lost_requests",
            "Requests whose replica ended before they did",
            ("outcome",),
            registry=self._registry,
        )

    def text(self, reports: Sequence[Report]) -> bytes:
        """In Prometheus' text format."""
        merged = CollectorRegistry()
        merged.register(_Merged(self._registry, reports))
        return generate_latest(merged)


class _Merged(Collector):
    """One family for each name, with everybody's samples. Nothing is added up: a replica that ends takes its counts along,
    which Prometheus understands of a series that ends, and not of a sum that falls."""

    def __init__(self, own: CollectorRegistry, reports: Sequence[Report]) -> None:
        self._own = own
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        _add(families, FRONT, self._own.collect())
        for report in self._reports:
            found = text_string_to_metric_families(report.text.decode())
            _add(families, report.replica, (one for one in found if not one.name.startswith(_COUNTED_IN_FRONT)))
        yield from families.values()
        yield GaugeMetricFamily("foredraft:num_replicas", "Replicas that answer", value=len(self._reports))
        about = GaugeMetricFamily("foredraft:replica_info", "Where a replica runs", labels=("replica", "host", "pid"))
        for report in self._reports:
            about.add_metric((report.replica, report.host, str(report.pid)), 1)
        yield about


def _add(families: dict[str, Metric], replica: str, found: Iterable[Metric]) -> None:
    for family in found:
        into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            into.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
