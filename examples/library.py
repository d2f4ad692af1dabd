"""penstock from Python: plan a model, start the bundled demo, ask it, scale it, end it.

python examples/library.py
"""

from __future__ import annotations

import penstock


def main() -> None:
    sizing = penstock.plan("llama-3.1-8b", gpu="h100-sxm", concurrency=32)
    assert sizing.layout is not None and sizing.speed is not None
    print(f"Llama 3.1 8B on {sizing.layout.n_ranks} H100: {sizing.speed.tpot_ms.likely:.1f} ms per token (estimate)")

    deployment = penstock.up({"model": "penstock-demo", "name": "library-demo", "gateway": {"port": 0}})
    try:
        reply = deployment.client().chat(
            [{"role": "user", "content": "What is penstock?"}], max_tokens=60, temperature=0
        )
        print(f"{deployment.url}: {reply.text}")
        state = deployment.scale(2)
        print(f"{deployment.name} is {state.phase} with {len(state.replicas)} replicas")
        print(f"{len(list(deployment.logs()))} lines of log so far")
    finally:
        deployment.down()
    print(f"{deployment.name} is {penstock.status('library-demo').phase}")


if __name__ == "__main__":
    try:
        main()
    except penstock.PenstockError as error:
        raise SystemExit(f"error: {error}") from None
