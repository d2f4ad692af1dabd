"""The fake engine of `penstock.testing` behind the same seam: faults and speed for tests, no model."""

from __future__ import annotations

import importlib.util

from penstock.engines import KEY_VARIABLE, Command, Missing, Place
from penstock.engines.vllm import names
from penstock.engines.vllm.engine import Vllm, caches, pass_through, sleep_flags
from penstock.errors import Problem
from penstock.planner import Plan
from penstock.spec.deployment import Scalar
from penstock.text import bare_flag


class Fake(Vllm):
    """Speaks vLLM's HTTP, metrics and log; `engine.args` are its own fault flags (docs/how-to/testing.md)."""

    name = "fake"
    package = None
    forms = ("safetensors", "gguf", "none")

    def missing(self) -> Missing | None:
        if importlib.util.find_spec("penstock.testing.fake_engine") is not None:
            return None
        return Missing("penstock.testing is not installed", "pip install penstock")

    def version(self) -> str:
        return "fake"

    def input_modalities(self, plan: Plan) -> tuple[str, ...]:
        return ("text", "image") if any(bare_flag(key) == "accepts-images" for key in plan.args) else ("text",)

    def why_sleepless(self, plan: Plan) -> str | None:
        return None

    def problems(self, args: dict[str, Scalar | list[Scalar]], version: str | None = None) -> list[Problem]:
        return []

    def command(self, plan: Plan, place: Place) -> Command:
        argv = [place.python, "-m", "penstock.testing.fake_engine", "--host", place.host, "--port", str(place.port)]
        argv += ["--model", plan.deployment, names.FLAGS["served_names"], *plan.served_names]
        argv += [names.FLAGS["cached_tokens"], *pass_through(plan.args)]
        argv += sleep_flags(plan)
        defaults, links = caches(plan, place.cache) if place.cache is not None else ({}, {})
        key = {KEY_VARIABLE: place.key} if place.key is not None else {}
        routes = names.DEV_MODE if plan.sleep is not None else {}
        return Command(tuple(argv), routes | plan.env | key, defaults=defaults, links=links)
