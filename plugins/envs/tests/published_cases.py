"""Environments that verifiers itself publishes, under a name that ``verifiers.load_environment`` takes."""

from __future__ import annotations

from typing import Any


def load_environment(which: str, **arguments: Any):
    if which == "reasoning-gym":
        from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

        return ReasoningGymEnv(**arguments)

    import verifiers as vf
    from verifiers.envs.integrations.textarena_env import TextArenaEnv

    def solved(parser, completion, answer):
        return float(parser.parse_answer(completion) == f"[{answer}]")

    parser = vf.XMLParser(fields=["guess"], answer_field="guess")
    return TextArenaEnv(game="Wordle-v0", parser=parser, rubric=vf.Rubric(funcs=[solved], parser=parser), **arguments)
