"""A game of several turns: find a hidden digit from the answers "higher" and "lower"."""

from rlplug.interfaces import Environment, StepResult
from rlplug.types import Prompt


class HiddenDigit(Environment):
    """Answers each guess with ``+`` (the hidden digit is higher) or ``-``; the prompt's ``answer`` is the digit.

    Args:
        guess_cost: Taken off the reward of 1 for each guess that is wrong.
    """

    def __init__(self, guess_cost: float = 0.1) -> None:
        self.guess_cost = guess_cost

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.hidden = int(prompt.answer)

    def step(self, completion: str) -> StepResult:
        if completion not in list("0123456789"):
            return StepResult("?", reward=-self.guess_cost)
        guess = int(completion)
        if guess == self.hidden:
            return StepResult(reward=1.0, done=True)
        return StepResult("+" if guess < self.hidden else "-", reward=-self.guess_cost)
