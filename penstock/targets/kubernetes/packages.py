"""The program of the init container of the chat page: `python3 -m penstock.targets.kubernetes.packages FOLDER`.

Installs Gradio into FOLDER where the image has none that fits. pip takes its index and proxies from its variables and
files, as always.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys

REQUIREMENT = "gradio>=6.20,<7"  # of the extra "ui"
_OLDEST, _NEXT = (6, 20), (7,)
_TRIES = {"PIP_RETRIES": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
_NO_INDEX = re.compile(
    r"NewConnectionError|ConnectTimeout|name resolution|Name or service not known|Max retries|ProxyE"
)
_CURE = f"set kubernetes.ui_image to an image with {REQUIREMENT}, or engine.env.PIP_INDEX_URL to an index that has it"


def installed() -> str | None:
    """The version of the image's Gradio that fits; None without one."""
    try:
        version = importlib.metadata.version("gradio")
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])
    return version if _OLDEST <= numbers < _NEXT else None


def why(output: str) -> str:
    """Why pip failed, from what it printed. Pure."""
    if "No module named pip" in output:
        return "this image has no pip"
    index = re.sub(r"//[^/@]*@", "//", os.environ.get("PIP_INDEX_URL", "pypi.org"))
    if _NO_INDEX.search(output):
        return f"no package index answers at {index}"
    if "not a trusted or secure host" in output:
        return f"pip ignores {index}, which is not https; PIP_TRUSTED_HOST allows it"
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines()
    return lines[-1].removeprefix("ERROR:").strip() if lines else "pip failed"


def main(words: list[str]) -> int:
    version = installed()
    if version is not None:
        print(f"penstock: this image has gradio {version}", flush=True)
        return 0
    # --target: also where the image's Python is one of its system, or of a virtual environment.
    argv = [sys.executable, "-m", "pip", "install", "--upgrade", "--no-cache-dir", "--target", words[0], REQUIREMENT]
    env = {**_TRIES, **os.environ}
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout, flush=True)
    if done.returncode:
        # `status` shows the last three lines.
        print(f"cannot install the chat page's packages\n{why(done.stdout)}\n{_CURE}", flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
