"""The program that runs vLLM without its server: `vllm.LLM`, as vLLM's own throughput and latency benchmarks do."""

from __future__ import annotations

import sys
from typing import Any

from penstock.engines.offline import Counted, Job, carry_out, read
from penstock.engines.vllm import names


def main(path: str) -> None:
    """Carry out the job in that file."""
    job = read(path)
    engine = _engine(job)
    from vllm import SamplingParams

    # What vLLM's benchmarks set (`benchmarks/throughput.py`, `latency.py`): exactly so many tokens, whatever they say.
    settings = [
        SamplingParams(temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=n_tokens)
        for n_tokens in job.output_tokens
    ]
    prompts: list[Any] = [
        prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)} for prompt in job.prompts
    ]

    def once() -> Counted:
        answers = engine.generate(prompts, settings, use_tqdm=False)
        return Counted(
            sum(len(answer.prompt_token_ids) for answer in answers),
            sum(len(answer.outputs[0].token_ids) for answer in answers),
        )

    carry_out(job, once)


def _engine(job: Job) -> Any:
    """The engine with the flags that `vllm serve` would get; those of its server are left out."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    words = [names.FLAGS["model"], *job.words, names.FLAGS["no_prefix_caching"]]
    options, _ = parser.parse_known_args(words)
    return LLM.from_engine_args(EngineArgs.from_cli_args(options))


if __name__ == "__main__":
    main(sys.argv[1])
