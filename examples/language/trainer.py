"""Federated tuning with transformers.Trainer at the clients: arrays of a peft adapter travel, nothing else.

pip install "atoll[llm]"
python examples/language/trainer.py

The base is a tiny random Llama that the script makes; use `AutoModelForCausalLM.from_pretrained` for yours.
"""

from __future__ import annotations

import tempfile

import peft
import torch
import transformers

import atoll
from atoll.data.sequences import Text, Tokenizer, token_rows

LETTERS = Tokenizer(lambda text: [ord(letter) - 95 for letter in text.replace(" ", "`")], num_tokens=28, begin=0)
SAYINGS = {"north": "the tide comes in", "east": "the ships set out", "south": "the reef is near"}


def sayings() -> atoll.Dataset:
    """Let each client repeat a saying of its own."""
    texts = [Text(owner, f"{saying} ") for owner, saying in SAYINGS.items() for _ in range(24)]
    return token_rows("sayings", texts, LETTERS, length=32)


def trainer_work(rank: int = 8, steps: int = 10):
    """Train an adapter by transformers.Trainer, and send it."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=LETTERS.num_tokens, initializer_range=0.2, **shape)
    base = transformers.LlamaForCausalLM(config)
    model = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=4 * rank, target_modules="all-linear"))

    def arrays():
        state = peft.get_peft_model_state_dict(model)
        return {name.replace(".", "_"): tensor.numpy().copy() for name, tensor in state.items()}

    def load(new):
        names = peft.get_peft_model_state_dict(model)
        peft.set_peft_model_state_dict(model, {n: torch.from_numpy(new[n.replace(".", "_")]) for n in names})

    def train(new, task, memory):
        load(new)
        rows = [{"input_ids": x, "labels": y, "shift_labels": y} for x, y in zip(task.x, task.y, strict=True)]
        with tempfile.TemporaryDirectory() as folder:
            settings = transformers.TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                learning_rate=task.lr,
                per_device_train_batch_size=8,
                seed=int(task.rng.integers(2**31)),
                remove_unused_columns=False,  # rows are shifted already
                dataloader_pin_memory=False,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            trainer = transformers.Trainer(model, settings, train_dataset=rows)
            trainer.remove_callback(transformers.PrinterCallback)
            loss = trainer.train().training_loss
        return arrays(), len(rows), {"loss": loss}

    def evaluate(new, task):
        load(new)
        with torch.no_grad():
            scores = model.eval()(input_ids=torch.from_numpy(task.x).long()).logits
        y = torch.from_numpy(task.y)
        losses = torch.nn.functional.cross_entropy(scores.transpose(1, 2), y, reduction="none")  # 0 where y is -100
        return {"loss": (losses.sum(1) / (y >= 0).sum(1)).sum()}

    return atoll.array_work(first=lambda dataset: arrays(), train=train, evaluate=evaluate)


def main(rounds: int = 8) -> list[float]:
    """Run some rounds and return the loss of each on all clients' held-out rows."""
    plan = atoll.Plan(
        work=trainer_work, data=sayings, partition="natural", local={"lr": 0.01}, rounds=rounds, engine="inline"
    )
    return [row["test"]["loss"] for row in atoll.run(plan).history]


if __name__ == "__main__":
    for number, loss in enumerate(main(), 1):
        print(f"round {number}: {loss:.3f} nats a letter")
