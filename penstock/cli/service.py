"""The verb `service`: a systemd unit of the user that starts a deployment and ends it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from penstock.cli import arguments

_UNIT = """\
[Unit]
Description=penstock deployment {name}
After=network-online.target
Wants=network-online.target

[Service]
Type=oneshot
RemainAfterExit=yes
Environment="PENSTOCK_HOME={home}"
ExecStart={penstock} up {source}
ExecStop={penstock} down {name}
TimeoutStartSec=infinity
TimeoutStopSec=infinity
KillMode=mixed

[Install]
WantedBy=default.target
"""


def register(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("install",), help="write the unit of FILE|MODEL")
    arguments.add_deployment(parser)
    arguments.complete(parser, _install, ("penstock service install qwen.yaml",))


def _install(options: argparse.Namespace) -> int:
    """Write ~/.config/systemd/user/penstock-NAME.service, and print what enables it."""
    from penstock import paths

    deployment = arguments.deployment_of(options)
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user"
    folder.mkdir(parents=True, exist_ok=True)
    unit = folder / f"penstock-{deployment.name}.service"
    is_file = options.source is not None and Path(options.source).exists()
    words = [str(Path(options.source).resolve()) if is_file else options.source or deployment.model]
    given = [setting for setting in arguments.settings_of(options) if not setting.startswith("name=")]
    for setting in [f"name={deployment.name}", *given]:
        words += ["--set", setting]
    penstock = shlex.join([sys.executable, "-m", "penstock.cli.main"])
    home = str(paths.home()).replace("\\", "\\\\").replace('"', '\\"')
    text = _UNIT.format(name=deployment.name, home=home, penstock=penstock, source=shlex.join(words))
    paths.write_atomically(unit, text.replace("%", "%%").replace("$", "$$").encode())
    print(f"wrote {unit}; enable it with:")
    print(f"  systemctl --user daemon-reload && systemctl --user enable --now {unit.name}")
    print("  loginctl enable-linger    # to start it with the machine, not with your login")
    return 0
