"""The quickstart's reward: a plain function, named in the configuration by its import path."""


def digits_in_place(completion: str, answer: str) -> float:
    """Return the share of digits that stand where the sorted number has them; 0 for another length."""
    if len(completion) != len(answer):
        return 0.0
    return sum(got == wanted for got, wanted in zip(completion, answer, strict=True)) / len(answer)
