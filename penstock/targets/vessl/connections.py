"""Which account of VESSL a deployment belongs to, and one `Api` for each."""

from __future__ import annotations

import contextlib

from penstock.errors import PenstockError
from penstock.run_folder import Run
from penstock.spec.blocks import Vessl
from penstock.targets.vessl import api, folder
from penstock.targets.vessl.api import Account, Api
from penstock.targets.vessl.run_yaml import block_of


class Connections:
    """Each method raises UserError where this machine has no account."""

    def __init__(self) -> None:
        self._apis: dict[Account, Api] = {}

    def of_block(self, block: Vessl) -> Api:
        return self._of(api.account(block))

    def of_run(self, run: Run) -> Api:
        """Where the run was started, whatever the configuration says by now."""
        note = folder.note_of(run)
        if note is None:
            with contextlib.suppress(PenstockError):
                return self.of_block(block_of(run.deployment()))
            return self.of_block(Vessl())  # a damaged folder
        account = api.account(Vessl(organization=note.organization, project=note.project))
        return self._of(account._replace(host=note.host))

    def _of(self, account: Account) -> Api:
        if account not in self._apis:
            self._apis[account] = Api(account)
        return self._apis[account]
