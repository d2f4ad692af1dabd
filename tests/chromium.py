"""Debian's Chromium for tests, which other tests on the machine do not disturb."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

# Chromium aborts what it loads (ERR_NETWORK_CHANGED) when the machine gets an address, as it does all the time while
# other tests make networks. Without a netlink socket it does not hear of that.
_DEAF = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/netlink.h>
#include <sys/socket.h>
int socket(int domain, int type, int protocol) {
  static int (*real)(int, int, int);
  if (!real) real = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
  if (domain == AF_NETLINK && protocol == NETLINK_ROUTE) { errno = EACCES; return -1; }
  return real(domain, type, protocol);
}
"""

WAIT_S = 90.0  # for what always comes: the tests of a run share two cores


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """One browser; its `expect` waits WAIT_S. Skips the test where there is no Chromium."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")
    expect.set_options(timeout=1000 * WAIT_S)
    with tempfile.TemporaryDirectory(prefix="penstock-chromium-") as folder, sync_playwright() as playwright:
        # Chromium refuses to sandbox for root, and /dev/shm is small in containers.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--lang=en"]
        env = {**os.environ, "LD_PRELOAD": library} if (library := _deaf_library(Path(folder))) else None
        launching = {"executable_path": program, "args": arguments, "env": env, "timeout": 1000 * WAIT_S}
        with playwright.chromium.launch(**launching) as browser:
            yield browser


def _deaf_library(folder: Path) -> str | None:
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source, library = folder / "deaf.c", folder / "deaf.so"
    source.write_text(_DEAF)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)
