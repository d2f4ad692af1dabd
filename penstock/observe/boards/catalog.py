"""All boards. Pure."""

from __future__ import annotations

from penstock.observe.boards.capacity import CAPACITY
from penstock.observe.boards.instances import INSTANCES
from penstock.observe.boards.operations import OPERATIONS
from penstock.observe.boards.status import STATUS

BOARDS = (OPERATIONS, INSTANCES, STATUS, CAPACITY)
