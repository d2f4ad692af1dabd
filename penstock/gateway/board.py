"""The posts that the nodes of one replica leave for each other. Pure: takes `now`.

Every node reaches the gateway on every target. It keeps the last post of each rank, unread, and returns all of them.
"""

from __future__ import annotations

from penstock.wire.announcement import BoardView, Post, PostView

FORGET_AFTER_S = 600.0


class RankBoard:
    def __init__(self, now: float) -> None:
        self._began = now
        self._posts: dict[tuple[str, int], tuple[float, Post]] = {}  # by replica and rank, with their times
        self._successors: set[str] = set()  # instances that came while the one before them was ordered to leave

    def rows(self, now: float, replica: str | None = None) -> tuple[PostView, ...]:
        """The last posts of all ranks, by rank: of one replica, or of all of them."""
        rows = [row for (name, _), row in self._posts.items() if replica in (None, name)]
        rows.sort(key=lambda row: (row[1].replica, row[1].rank))
        return tuple(PostView(post, round(now - at, 3)) for at, post in rows)

    def post(self, post: Post, now: float, *, must_leave: bool = False) -> BoardView:
        """Replaces the rank's last post and returns those of every rank.

        `must_leave`: the replica must leave. The order does not hold for a process that replaced one that left.
        """
        _, before = self._posts.get((post.replica, post.rank), (0.0, post))
        if must_leave and before.instance != post.instance:
            self._successors.add(post.instance)
        elif not must_leave:
            self._successors.discard(post.instance)
        self._posts[post.replica, post.rank] = (now, post)
        self._posts = {key: row for key, row in self._posts.items() if now - row[0] < FORGET_AFTER_S}
        self._successors &= {row.instance for _, row in self._posts.values()}
        must_leave = must_leave and post.instance not in self._successors
        return BoardView(round(now - self._began, 3), self.rows(now, post.replica), must_leave)
