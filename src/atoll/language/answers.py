"""What a language model says before and after training: samples, exact answers, and choices by likelihood.

All is greedy and of a run that has ended, so that nothing of training can depend on it. Shapes: T tokens, K of the
vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.errors import DataError, RunError
from atoll.core.plan import Plan
from atoll.data.dataset import Dataset
from atoll.data.sequences import Tokenizer, hf_tokenizer
from atoll.data.targets import IGNORED
from atoll.language.export import models_of
from atoll.report.html import write_report
from atoll.report.reading import read_run

ANSWERS = "answers.json"
PROMPT_TOKENS = 16
"""How much of a row of the test set is a prompt, where the row does not say which tokens are."""
NEW_TOKENS = 40
"""How many tokens a sample has at most, after its prompt."""
SPARE_TOKENS = 8
"""How many more tokens than the right answer a model may say before it is cut off, and wrong."""


class Question(NamedTuple):
    """What is asked, the right answer, and other answers to choose between."""

    prompt: str
    answer: str
    candidates: tuple[str, ...] = ()
    """All answers to choose between, the right one among them; empty if there is no choice."""


def answers(
    run: str | Path,
    *,
    samples: int = 3,
    prompts: Sequence[str] = (),
    questions: Sequence[Question] = (),
) -> dict[str, Any]:
    """Let the base and the trained model of a run speak; write what they say to `answers.json` and the report.

    `samples` prompts are beginnings of rows of the test set, spread over it, and `prompts` are others. Of `questions`
    the share with an exact answer is measured, and of those with candidates the share where the right one is likeliest.
    """
    path = Path(run)
    before, after = models_of(path)
    plan = read_run(path).plan
    tokenizer = hf_tokenizer(str(plan.model.options["path"]))
    asked = [*_beginnings(plan, samples), *(_ids(tokenizer, prompt) for prompt in prompts)]
    models = {"before": before, "after": after}
    said = [
        {"prompt": tokenizer.decode(ids)} | {when: _said(model, tokenizer, ids) for when, model in models.items()}
        for ids in asked
    ]
    found: dict[str, Any] = {"samples": said}
    if questions:
        shares = {when: figures(model, tokenizer, questions) for when, model in models.items()}
        found["questions"] = {"num": len(questions), **shares}
    (path / ANSWERS).write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding="utf-8")
    write_report([path])
    return found


def read_questions(path: Path) -> list[Question]:
    """Read a file with a JSON object a line: `prompt`, `answer` and, for a choice, `candidates`."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question = Question(
                str(entry["prompt"]), str(entry["answer"]), tuple(map(str, entry.get("candidates", ())))
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}, line {number}: {error!r}; each line must be a JSON object with prompt, answer and, for a "
                "choice, a list of candidates"
            ) from error
        if question.candidates and question.answer not in question.candidates:
            raise DataError(
                f"{path}, line {number}: the answer {question.answer!r} is not among the candidates "
                f"{list(question.candidates)}: add it"
            )
        found.append(question)
    if not found:
        raise DataError(f"{path} holds no question: write a JSON object with prompt and answer a line")
    return found


def figures(model: nn.Module, tokenizer: Tokenizer, questions: Sequence[Question]) -> dict[str, float]:
    """Return the share of exact answers, and of right choices where there are candidates."""
    exact = [_is_exact(model, tokenizer, question) for question in questions]
    choices = [question for question in questions if question.candidates]
    right = [chosen(model, tokenizer, question) == question.answer for question in choices]
    shares = {"exact_match": sum(exact) / len(exact)}
    return shares | ({"multiple_choice": sum(right) / len(right)} if right else {})


def chosen(model: nn.Module, tokenizer: Tokenizer, question: Question) -> str:
    """Return the candidate whose tokens have the highest sum of log likelihoods after the prompt."""
    asked = _ids(tokenizer, question.prompt)
    likelihoods = [log_likelihood(model, asked, tokenizer.encode(each)) for each in question.candidates]
    return question.candidates[int(np.argmax(likelihoods))]


def log_likelihood(model: nn.Module, prompt: Sequence[int], candidate: Sequence[int]) -> float:
    """Return sum_t log p(candidate_t | prompt, candidate_<t)."""
    ids_T = torch.tensor([*prompt, *candidate])
    with torch.inference_mode():
        scores_TK: Tensor = model(ids_T[None, :-1])[0, len(prompt) - 1 :].double()
    return float(scores_TK.log_softmax(-1).gather(-1, ids_T[len(prompt) :, None]).sum())


def greedy(model: nn.Module, prompt: Sequence[int], num: int, end: int | None) -> list[int]:
    """Return the likeliest next tokens one after another: `num` of them, or those before the end of a text."""
    ids, longest = list(prompt), _longest(model)
    with torch.inference_mode():
        for _ in range(num):
            following = int(model(torch.tensor([ids[-longest:]]))[0, -1].argmax())
            if following == end:
                break
            ids.append(following)
    return ids[len(prompt) :]


def _longest(model: nn.Module) -> int:
    config = getattr(getattr(model, "model", None), "config", None)
    return int(getattr(config, "max_position_embeddings", 2**31))


def _ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens of a prompt as rows of training have them."""
    ids = [*([] if tokenizer.begin is None else [tokenizer.begin]), *tokenizer.encode(prompt)]
    if not ids:
        raise DataError(f"prompt {prompt!r} has no token: give a longer one")
    return ids


def _is_exact(model: nn.Module, tokenizer: Tokenizer, question: Question) -> bool:
    num = len(tokenizer.encode(question.answer)) + SPARE_TOKENS
    said = greedy(model, _ids(tokenizer, question.prompt), num, tokenizer.end)
    return str(tokenizer.decode(said)).strip() == question.answer.strip()


def _said(model: nn.Module, tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(greedy(model, ids, NEW_TOKENS, tokenizer.end)))


def _beginnings(plan: Plan, num: int) -> list[list[int]]:
    """Return the first tokens of some rows of the test set: up to the first that counts, where some do not."""
    if not num:
        return []
    data: Dataset = plan.data.build("data.catalog")
    if not data.tokens or not data.num_test:
        raise RunError(f"{data.name} has no test rows of tokens to take prompts from: set samples to 0, give prompts")
    rows = np.unique(np.linspace(0, data.num_test - 1, num).round().astype(int))
    return [_beginning(data.test_x[row], data.test_y[row]) for row in rows]


def _beginning(x_T: Any, y_T: Any) -> list[int]:
    first = int((np.asarray(y_T) != IGNORED).argmax())
    return [int(token) for token in x_T[: first + 1 if first else min(PROMPT_TOKENS, len(x_T) // 2 + 1)]]
