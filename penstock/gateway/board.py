"""What the nodes of one replica tell each other before and while they run together. Pure: the clock is passed in.

The gateway is the one place that every node reaches on every target; it keeps the last word of each rank and hands
all of them back. It reads none of it.
"""

from __future__ import annotations

from penstock.wire.announcement import BoardView, Post, PostView

FORGET_AFTER_S = 600.0


class RankBoard:
    """The last post of every rank of every replica."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._posts: dict[str, dict[int, tuple[float, Post]]] = {}

    def post(self, post: Post, now: float) -> BoardView:
        """Keeps it in place of the same rank's last one, and tells what every rank of that replica said."""
        rows = self._posts.setdefault(post.replica, {})
        rows[post.rank] = (now, post)
        for replica in list(self._posts):
            kept = {rank: row for rank, row in self._posts[replica].items() if now - row[0] < FORGET_AFTER_S}
            if kept:
                self._posts[replica] = kept
            else:
                del self._posts[replica]
        views = (PostView(row, round(now - at, 3)) for at, row in self._posts[post.replica].values())
        return BoardView(round(now - self._began, 3), tuple(sorted(views, key=lambda view: view.post.rank)))
