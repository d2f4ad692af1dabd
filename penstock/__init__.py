"""penstock: one file and one command take any open LLM from a laptop to a cluster.

As a library: `plan`, `up`, `status`, `logs`, `scale`, `sleep`, `wake`, `down` and `Client`; see
docs/how-to/library.md. Each is imported when it is first used, so `import penstock` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from penstock.deployment.library import RunningDeployment, down, logs, plan, scale, sleep, status, up, wake
    from penstock.errors import PenstockError, UserError
    from penstock.planner.request import Sizing
    from penstock.run_folder import State
    from penstock.spec.deployment import Deployment
    from penstock.wire.client import Client

__version__ = "0.1.0"
__all__ = ["Client", "Deployment", "PenstockError", "RunningDeployment", "Sizing", "State", "UserError"]
__all__ += ["down", "logs", "plan", "scale", "sleep", "status", "up", "wake"]

_MODULES = {
    "Client": "penstock.wire.client",
    "Deployment": "penstock.spec.deployment",
    "PenstockError": "penstock.errors",
    "Sizing": "penstock.planner.request",
    "State": "penstock.run_folder",
    "UserError": "penstock.errors",
}


if not TYPE_CHECKING:  # a type checker knows the names above, and refuses others

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(_MODULES.get(name, "penstock.deployment.library")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
