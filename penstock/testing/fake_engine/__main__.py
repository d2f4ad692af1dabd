"""The fake engine's process: its log, its signals, its child, its exit codes. `--help` lists the flags."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence

from penstock.testing.fake_engine import child, compiled, startup_log
from penstock.testing.fake_engine.options import Options, parse
from penstock.testing.fake_engine.server import Connection, Engine, disarm, is_armed
from penstock.testing.fake_engine.startup_log import Line

_LAST_WORDS_S = 0.5  # between the engine process's death and ours


class Process:
    """This process. `core` is the child's pid, or None."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.core = child.fork() if options.child else None

    def run(self) -> int:
        self._set_signals_while_loading()
        try:
            listener = _bind(self.options)
        except OSError:
            self.log_all(startup_log.port_taken())
            return 1
        options, port = self.options, listener.getsockname()[1]
        if (options.oom or options.crash_at_start) and is_armed(options):
            self.log_all(startup_log.refuse(options, port))
            disarm(options)
            return 1
        if options.compile_s:
            self.log_all(compiled.compile_or_load(options))
        self.log_all(startup_log.start(options, port))
        return asyncio.run(self._serve(listener))

    def log(self, line: Line) -> None:
        pid = self.core if line.who == "EngineCore" and self.core else os.getpid()
        stream = sys.stdout if line.who else sys.stderr
        # Whoever read our log may be gone (a node killed with -9); logging never ends vLLM either.
        with contextlib.suppress(OSError):
            stream.write(line.render(pid, time.strftime("%m-%d %H:%M:%S")) + "\n")
            stream.flush()

    def log_all(self, lines: Iterable[Line]) -> None:
        for line in lines:
            if line.wait_s:
                time.sleep(line.wait_s)
            self.log(line)

    def end_core(self) -> None:
        if self.core is not None:
            child.end(self.core)
            self.core = None

    def _set_signals_while_loading(self) -> None:
        if self.options.ignore_sigterm_while_loading or self.options.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return

        def die(number: int, _frame: object) -> None:
            self.end_core()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, die)

    def _die(self) -> None:
        self.end_core()
        os._exit(1)

    async def _serve(self, listener: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        engine = Engine(self.options, self.log, self._die)
        exit_code: asyncio.Future[int] = loop.create_future()
        tasks: list[asyncio.Task[None]] = []

        async def stop() -> None:
            self.log_all(startup_log.stopping(self.options.shutdown_timeout))
            await engine.stop(self.options.shutdown_timeout)
            if not exit_code.done():
                exit_code.set_result(0)

        async def watch() -> None:
            if self.core is not None and child.has_ended(self.core) and not engine.is_dead:
                self.core = None
                await engine.lose_core()
                await asyncio.sleep(_LAST_WORDS_S)
                if not exit_code.done():
                    exit_code.set_result(1)

        if not self.options.ignore_sigterm:
            loop.add_signal_handler(signal.SIGTERM, lambda: tasks.append(loop.create_task(stop())))
        loop.add_signal_handler(signal.SIGINT, lambda: tasks.append(loop.create_task(stop())))
        loop.add_signal_handler(signal.SIGCHLD, lambda: tasks.append(loop.create_task(watch())))
        server = await loop.create_server(lambda: Connection(engine), sock=listener, backlog=1024)
        tasks.append(loop.create_task(watch()))  # the child may have died while we loaded
        self.log_all(startup_log.ready(os.getpid()))
        code = await exit_code
        server.close()
        for connection in tuple(engine.connections):
            connection.close()
        self.log_all(startup_log.stopped(os.getpid()))
        return code


def main(argv: Sequence[str]) -> int:
    process = Process(parse(argv))
    try:
        return process.run()
    finally:
        process.end_core()


def _bind(options: Options) -> socket.socket:
    """Takes the port early, as vLLM does; connections are refused until the server listens."""
    listener = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((options.host, options.port))
    return listener


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
