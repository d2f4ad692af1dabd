"""The posts that the nodes of one replica leave for each other. Pure: takes `now`.

Every node reaches the gateway on every target. It keeps the last post of each rank, unread, and returns all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.wire.announcement import BoardView, Post, PostView

FORGET_AFTER_S = 600.0


class RankBoard:
    def __init__(self, now: float) -> None:
        self._began = now
        self._posts: dict[str, dict[int, tuple[float, Post]]] = {}
        self._successors: set[str] = set()  # instances that came while the one before them was ordered to leave

    def rows(self, now: float) -> tuple[PostView, ...]:
        """The last posts of all ranks of all replicas."""
        return tuple(view for replica in self._posts for view in self._views(replica, now))

    def _views(self, replica: str, now: float) -> Iterator[PostView]:
        return (PostView(post, round(now - at, 3)) for at, post in self._posts[replica].values())

    def post(self, post: Post, now: float, *, must_leave: bool = False) -> BoardView:
        """Replaces the rank's last post and returns those of every rank.

        `must_leave`: the replica must leave. The order does not hold for a process that replaced one that left.
        """
        rows = self._posts.setdefault(post.replica, {})
        if must_leave and post.rank in rows and rows[post.rank][1].instance != post.instance:
            self._successors.add(post.instance)
        elif not must_leave:
            self._successors.discard(post.instance)
        rows[post.rank] = (now, post)
        for replica, posts_of in list(self._posts.items()):
            self._posts[replica] = {rank: row for rank, row in posts_of.items() if now - row[0] < FORGET_AFTER_S}
        self._posts = {replica: rows for replica, rows in self._posts.items() if rows}
        self._successors &= {row.instance for rows in self._posts.values() for _, row in rows.values()}
        posts = tuple(sorted(self._views(post.replica, now), key=lambda view: view.post.rank))
        return BoardView(round(now - self._began, 3), posts, must_leave and post.instance not in self._successors)
