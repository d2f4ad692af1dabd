"""Debian's Chromium for tests, which other tests on the machine do not disturb."""

from __future__ import annotations

import contextlib
import functools
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


@contextlib.contextmanager
def chromium(timeout_s: float = 30.0) -> Iterator[Browser]:
    """One browser; skips the test where there is no Chromium. `timeout_s`: of `expect`."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")
    expect.set_options(timeout=timeout_s * 1000)
    with sync_playwright() as playwright:
        # Chromium refuses to sandbox for root, and /dev/shm is small in containers.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--lang=en"]
        env = {**os.environ, "LD_PRELOAD": library} if (library := _deaf_library()) else None
        with playwright.chromium.launch(executable_path=program, args=arguments, env=env) as browser:
            yield browser


@functools.cache
def _deaf_library() -> str | None:
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="penstock-chromium-"))
    source, library = folder / "deaf.c", folder / "deaf.so"
    source.write_text(_DEAF)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)
