"""A fake engine: vLLM's HTTP, metrics, log and signals, and faults on demand, without a model.

`python -m penstock.testing.fake_engine --host 127.0.0.1 --port 8001 --model NAME` is the process; `running` starts one
inside a test. Shapes, messages and log lines are those of vLLM 0.32.0 on a CPU, recorded in tests/golden/vllm-0.32.0.
Token number i is the prompt's i-th word with its number, "1:tell 2:me 3:a ...": a lost or doubled token shows.
"""
