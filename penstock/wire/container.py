"""What is asked of a container that holds a whole deployment, and what it tells: its control port, JSON over HTTP.

    GET  /container            ContainerView
    POST /container/replicas   Named: exactly these replicas; answers ContainerView
    POST /container/desired    what the user asked for (desired.json)
    POST /container/end        End: finish what runs, and exit
    POST /container/verb       `keys` or `usage`, next to the gateway (`wire/command.py`)

Every call needs `Authorization: Bearer TOKEN`, with the deployment's admin token.
"""

from __future__ import annotations

import msgspec

PATH = "/container"
# The variable with the secret: the admin token, and where `up` made a client's key, a colon and that key's hash.
SECRET_VARIABLE = "PENSTOCK_SECRET"
# Files of the run folder inside that are for the machines of verbs.
STATE_FILES = ("state.json", "desired.json", "events.jsonl")


class ContainerView(msgspec.Struct, frozen=True):
    """`stage`: what it does before the deployment exists. `refusal`: why there will be none; it ends soon after.

    `units`: by the key of each unit, why it is gone, or None where it lives. `files`: texts by their names.
    """

    version: str
    stage: str | None = None
    refusal: str | None = None
    units: dict[str, str | None] = {}
    files: dict[str, str] = {}


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    replicas: tuple[str, ...]


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`now`: requests in flight are cut."""

    now: bool = False
