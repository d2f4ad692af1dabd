"""The program that runs llama.cpp without HTTP: the wheel's server object, called in its own process."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from penstock.engines.llamacpp import engine
from penstock.engines.offline import Counted, carry_out, read


def main(path: str) -> None:
    """Carry out the job in that file."""
    job = read(path)
    options = engine.options_of([*job.words, "--verbosity", "0"])
    server = engine.server_of(options)

    def answer(index: int) -> Counted:
        prompt = job.prompts[index]
        told = server.handle_completions(
            {
                "prompt": prompt if isinstance(prompt, str) else list(prompt),
                "n_predict": job.output_tokens[index],
                "temperature": 1.0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        usage = told.get("usage")
        if not isinstance(usage, dict):
            raise RuntimeError(f"llama.cpp answered {str(told)[:300]}")
        return Counted(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))

    # A thread for each of its slots: more would only wait, and it takes no list of lengths.
    with ThreadPoolExecutor(min(options.parallel, len(job.prompts))) as pool:

        def once() -> Counted:
            answers = list(pool.map(answer, range(len(job.prompts))))
            return Counted(sum(one.input_tokens for one in answers), sum(one.output_tokens for one in answers))

        carry_out(job, once)


if __name__ == "__main__":
    main(sys.argv[1])
