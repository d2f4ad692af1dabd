"""The main job in one file: start the bundled model, ask it twice through the gateway, leave it running.

    python examples/demo.py [--engine vllm]

`make demo` runs this. It is also the shortest example of penstock as a library.
"""

from __future__ import annotations

import argparse
import sys

from penstock import paths, run_folder
from penstock.cli import progress, status_text
from penstock.deployment import start, stop
from penstock.errors import PenstockError, UserError
from penstock.hardware.network import check_port
from penstock.spec import deployment, reading
from penstock.text import show_seconds
from penstock.wire.answers import Chunk, Reply
from penstock.wire.client import Client

QUESTION = "What is penstock?"
TASK = "Tell me a story about a river."


def main() -> int:
    parser = argparse.ArgumentParser(description="Start the bundled demo and ask it two questions.")
    parser.add_argument("--engine", default="auto", choices=("auto", "vllm", "llamacpp"))
    options = parser.parse_args()
    name = deployment.DEMO_MODEL + ("-vllm" if options.engine == "vllm" else "")
    try:
        client = _start(name, options.engine)
        _ask(client)
        _ask_streamed(client)
    except PenstockError as error:
        print(f"error: {error.message}", *filter(None, (error.detail, error.hint)), sep="\n  ", file=sys.stderr)
        return error.exit_code
    print(f"\nIt stays up; end it with: {status_text.command_name()} down {name}")
    return 0


def _start(name: str, engine: str) -> Client:
    existing = run_folder.Run(paths.home() / "runs" / name)
    if existing.exists() and not existing.is_ended():
        port = existing.deployment().gateway.port
    else:
        port = 8000 if _is_free(8000) else 0
    wanted = {"model": deployment.DEMO_MODEL, "name": name, "engine": {"kind": engine}, "gateway": {"port": port}}
    started = start.up(reading.from_mapping(wanted))
    run = run_folder.find(started.name)
    try:
        with progress.StartDisplay(sys.stdout, as_json=False) as display:
            state = start.wait_ready(run, display.show)
    except KeyboardInterrupt:
        stop.down(run, now=True)
        raise SystemExit(130) from None
    print(status_text.ready_text(run, state, started))
    return Client(run.url)


def _is_free(port: int) -> bool:
    try:
        check_port("127.0.0.1", port)
    except UserError:
        return False
    return True


def _ask(client: Client) -> None:
    print(f"\n> {QUESTION}")
    reply = client.chat([{"role": "user", "content": QUESTION}], max_tokens=100, temperature=0)
    print(reply.text)
    print(f"  ({reply.output_tokens} tokens in {show_seconds(reply.duration_s)})")


def _ask_streamed(client: Client) -> None:
    print(f"\n> {TASK}   (streamed)")
    for part in client.stream_chat([{"role": "user", "content": TASK}], max_tokens=200, temperature=0):
        if isinstance(part, Chunk):
            print(part.text, end="", flush=True)
        elif isinstance(part, Reply):
            ttft = show_seconds(part.ttft_s) if part.ttft_s is not None else "-"
            rate = f", {part.tokens_per_s:.0f} tokens/s" if part.tokens_per_s else ""
            print(
                f"\n  (first token after {ttft}, {part.output_tokens} tokens in {show_seconds(part.duration_s)}{rate})"
            )


if __name__ == "__main__":
    sys.exit(main())
