"""A fake engine: vLLM's HTTP, metrics, log and signals, and faults on demand, without a model.

`python -m penstock.testing.fake_engine --host 127.0.0.1 --port 8001 --model NAME` is the process; `running` starts one
inside a test. Shapes, messages and log lines are those of vLLM 0.32.0 on a CPU, recorded in tests/golden/vllm-0.32.0.

Theory of operation. `options` is what was asked for. `startup_log` makes the log until it is ready, `requests` turns a
body into an `Ask` (or vLLM's refusal), `replies` turns an `Ask` into bytes, `metrics` counts: these are pure. `server`
writes tokens when they are due and is the only one with sockets; `__main__` is the process: log, signals, the child,
exit codes.

The output is a function of the prompt: token number i is the prompt's i-th word with its number, "1:tell 2:me 3:a ...",
round and round. A lost, doubled or swapped token shows.
"""
