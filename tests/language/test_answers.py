"""What models say before and after: greedy text, choices by likelihood, exact answers, and the report about them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from atoll.api import run
from atoll.cli.main import app
from atoll.core.errors import DataError, RunError
from atoll.core.plan import Plan
from atoll.data.sequences import Tokenizer
from atoll.language.answers import Question, answers, chosen, figures, greedy, log_likelihood, read_questions

pytest.importorskip("transformers", reason="needs the extra llm: pip install 'atoll[llm]'")
pytest.importorskip("peft", reason="needs the extra llm: pip install 'atoll[llm]'")

LETTERS = Tokenizer(
    lambda text: [ord(letter) - 97 for letter in text],
    28,
    begin=26,
    end=27,
    decode=lambda ids: "".join(chr(97 + number) for number in ids),
)


class Alphabet(nn.Module):
    """Says that the next letter of the alphabet follows, with odds of 9 to 1 against all others together."""

    def forward(self, tokens: Tensor) -> Tensor:
        following = nn.functional.one_hot((tokens + 1) % 28, 28).double()
        return torch.where(following == 1, math.log(0.9), math.log(0.1 / 27))


def shifted(text: str) -> str:
    return "".join(chr((ord(letter) - 97 + 1) % 26 + 97) if letter.isalpha() else letter for letter in text)


def test_greedy_text_ends_where_a_text_ends() -> None:
    assert greedy(Alphabet(), [23], 10, end=27) == [24, 25, 26]
    assert greedy(Alphabet(), [0], 4, end=27) == [1, 2, 3, 4]


def test_likelihoods_are_summed_over_the_tokens_of_a_candidate() -> None:
    assert log_likelihood(Alphabet(), [0], [1, 2]) == pytest.approx(2 * math.log(0.9))
    assert log_likelihood(Alphabet(), [0], [1, 9, 10]) == pytest.approx(2 * math.log(0.9) + math.log(0.1 / 27))


def test_a_choice_goes_by_the_sum_and_an_answer_must_be_exact() -> None:
    one = Question("ab", "cd", ("xy", "cd", "x"))
    short = Question("ab", "cde", ("cx", "cde", "cdefghijklmnopqrstuvw"))  # of right ones the shorter is likelier
    assert chosen(Alphabet(), LETTERS, one) == "cd" and chosen(Alphabet(), LETTERS, short) == "cde"
    wrong = Question("ab", "x", ("x", "c"))
    end = Question("w", "xyz{")  # the whole text that follows
    assert figures(Alphabet(), LETTERS, [one, wrong]) == {"exact_match": 0.0, "multiple_choice": 0.5}
    assert figures(Alphabet(), LETTERS, [end]) == {"exact_match": 1.0}


@pytest.mark.parametrize("algorithm", [pytest.param("fedit", marks=pytest.mark.slow), "flora"])
def test_a_trained_model_says_what_its_clients_say(llm_plan: Plan, texts: Path, tmp_path: Path, algorithm: str) -> None:
    changes = {"algorithm": algorithm, "data.prompt": "asked", "data.packed": False, "data.length": 32}
    plan = llm_plan.replace({**changes, "partition": "iid", "partition.num_clients": 2, "policy": {"size": 2}})
    said = sorted({json.loads(line)["said"] for line in texts.read_text().splitlines()})
    run(
        plan.replace({"rounds": 8, "local.optimizer": "adam", "local.lr": 0.03, "local.epochs": 4}),
        out=tmp_path / "run",
    )
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    asked = [Question("say it ", each, (each, shifted(each))) for each in said]
    found = answers(tmp_path / "run", samples=2, prompts=["say it "], questions=asked)
    assert len(found["samples"]) == 3 and found["questions"]["num"] == len(said)
    assert all(each["before"] != each["after"] for each in found["samples"])
    before, after = found["questions"]["before"], found["questions"]["after"]
    assert before["multiple_choice"] < 0.8 and after["multiple_choice"] > 0.9
    assert json.loads((tmp_path / "run" / "answers.json").read_text()) == found
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights


def test_the_report_shows_what_was_said_without_trusting_it(llm_plan: Plan, tmp_path: Path) -> None:
    run(llm_plan.replace({"rounds": 1, "evaluation.clients_every": 1}), out=tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(words in page for words in ("perplexity", "test loss", "Spread over clients", "clients&#x27; loss"))
    assert "What the model says" not in page
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"prompt": "say it ", "answer": "a", "candidates": ["a", "b"]}) + "\n")
    done = CliRunner().invoke(app, ["answers", str(tmp_path / "run"), "--questions", str(questions), "--prompt", "ab"])
    assert done.exit_code == 0, done.output
    assert "exact match 0.0 %" in done.output and done.output.count("prompt:") == 4
    table: dict[str, Any] = json.loads((tmp_path / "run" / "answers.json").read_text())
    table["samples"][0]["after"] = "<script>alert(1)</script>"
    (tmp_path / "run" / "answers.json").write_text(json.dumps(table))
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "What the model says" in page and "multiple choice" in page
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page
    (tmp_path / "run" / "answers.json").write_text('{"samples": [{"prompt": 1}]}')
    with pytest.raises(RunError, match=r"answers.json is damaged: \"samples\" must be"):
        answers(tmp_path / "run")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"}', "line 1: KeyError.*JSON object with prompt, answer"),
        ("[]", "line 1: TypeError"),
        ('{"prompt": "a", "answer": "b", "candidates": ["c"]}', r"answer 'b' is not among the candidates \['c'\]: add"),
        ("", "holds no question"),
    ],
)
def test_wrong_questions_are_refused(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "q.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=words):
        read_questions(tmp_path / "q.jsonl")
