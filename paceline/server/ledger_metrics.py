"""The engine's ledger on /metrics. Tenants named by the field `user` are told as hashes: it may hold an address."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2s

from prometheus_client import CollectorRegistry, Counter

from ..engine.messages import LedgerTotals
from ..sched.ledger import OTHER

DEFAULT_TENANT = "default"
LEDGER_COUNTERS = {
    "queue_seconds": ("Seconds that requests waited, by the limit that held the queue", "cause"),
    "block_seconds": ("KV blocks held by running requests times seconds, by phase", "phase"),
}


class LedgerMetrics:
    """Counters that follow LedgerTotals."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str], tenants: Collection[str]) -> None:
        """labels: of the engine, on every sample; tenants: those that may be told by name."""
        self._values = tuple(labels.values())
        self._shown = {*tenants, DEFAULT_TENANT, OTHER}
        self._counters = {
            name: Counter(f"paceline:{name}", text, (*labels, "tenant", label), registry=registry)
            for name, (text, label) in LEDGER_COUNTERS.items()
        }
        self._told: dict[tuple[str, str, str], float] = {}

    def take(self, totals: LedgerTotals) -> None:
        for name, counter in self._counters.items():
            for tenant, what, seconds in getattr(totals, name):
                grown = seconds - self._told.get((name, tenant, what), 0.0)
                if grown > 0:
                    shown = tenant if tenant in self._shown else hidden_user(tenant)
                    counter.labels(*self._values, shown, what).inc(grown)
                    self._told[name, tenant, what] = seconds


def hidden_user(tenant: str) -> str:
    """What clients send as `user` may be a name or an address."""
    return "user:" + blake2s(tenant.encode(), digest_size=6).hexdigest()
