"""How many connections a download is worth.

Few are fastest where a machine's own cores are the limit, or a link that they share. A single connection to S3 gives 85
to 90 MB/s at best (https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html), so
where each brings no more than that they are doubled, and doubled again while that pays.
"""

CONNECTIONS = 4
MOST_CONNECTIONS = 16
SLOW_BYTES_S = 90e6
# Less than this is no gain from twice the connections, but chance.
_GAIN = 1.25


class ConnectionScaler:
    """Decides how many connections to add from the rate of finished requests. began: time in seconds of any clock."""

    def __init__(self, began: float) -> None:
        self._since, self._bytes, self._requests = began, 0, 0
        self._best = 0.0

    def more(self, size: int, now: float, connections: int) -> int:
        """The number of connections to add, after one of `connections` received `size` bytes at the time `now` (s).

        0 until as many requests have finished as there are connections.
        """
        self._bytes, self._requests = self._bytes + size, self._requests + 1
        if self._requests < connections:
            return 0
        rate = self._bytes / max(now - self._since, 1e-9)
        pays = rate >= _GAIN * self._best
        self._since, self._bytes, self._requests, self._best = now, 0, 0, max(rate, self._best)
        slow = rate < connections * SLOW_BYTES_S
        return min(connections, MOST_CONNECTIONS - connections) if pays and slow else 0
