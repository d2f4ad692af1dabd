"""Which variables probably hold a secret, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)(?:_|$)"
)


def secret_names(names: Iterable[str]) -> list[str]:
    """Those whose values are probably secret, so that nothing that is sent in clear may show them."""
    return [name for name in names if _SECRET_NAME.search(name.upper())]
