"""What failures do to a replica's traffic. Pure: takes `now`."""

from __future__ import annotations

from dataclasses import dataclass, field

EJECT_AFTER = 3  # failures in a row
EJECTION_S = 1.0  # the first one; each further one doubles it
EJECTION_S_MAX = 60.0
RAMP_S = 10.0  # from RAMP_FLOOR to the whole of its weight, after an ejection
RAMP_FLOOR = 0.1


@dataclass(slots=True)
class Health:
    """One replica's failures. Times are monotonic seconds; `ejected_until` is in the past for a replica in use."""

    n_failures: int = 0  # in a row
    n_ejections: int = 0  # since it last went through a whole ramp
    ejected_until: float = 0.0
    failed_clients: set[bytes] = field(default_factory=set)  # whose requests failed since the last success

    def fail(self, now: float) -> bool:
        """Records a failure that the replica caused; returns whether it ejects. After an ejection one is enough."""
        self.n_failures += 1
        is_back = self.n_ejections > 0 and now < self.ejected_until + RAMP_S
        if now < self.ejected_until or self.n_failures < (1 if is_back else EJECT_AFTER):
            return False
        self.ejected_until = now + min(EJECTION_S * 2**self.n_ejections, EJECTION_S_MAX)
        self.n_ejections = min(self.n_ejections + 1, 16)
        self.n_failures = 0
        return True

    def fail_for(self, client: bytes) -> bool:
        """Whether requests of several clients have failed since the last success."""
        self.failed_clients.add(client)
        return len(self.failed_clients) > 1

    def succeed(self) -> None:
        self.n_failures = 0
        if self.failed_clients:
            self.failed_clients.clear()

    def share(self, now: float) -> float:
        """The part of its weight that counts: 1 unless it was ejected less than RAMP_S ago."""
        if not self.n_ejections:
            return 1.0
        back_s = now - self.ejected_until
        if back_s >= RAMP_S:
            self.n_ejections = 0
            return 1.0
        return max(RAMP_FLOOR, back_s / RAMP_S)
