"""GPT-1's inputs: rows with start, delimiter and extract tokens, both orders, choices, and the combined loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.fit import FitSettings, Point, Tuning, load_config, run_point
from ctxlm_ds.apps.downstream.prepare import Parts, make_kind, make_sets
from ctxlm_ds.apps.downstream.task import TaskDescription, load_task
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import sentiment, write_bert, write_gpt2

PAIRS = [
    Example("t:1", "the good film", "Ann met", "5"),
    Example("t:2", "a bad film was very good", "who", "1"),
    Example("t:3", "Paris", "in Paris", "2.5"),
]
CHOICES = [
    Example("t:1", "Ann met", "who ?", "A", ("Ann", "the film")),
    Example("t:2", "the film", None, "1", ("a bad film .", "very good")),
]


def make(
    folder: Path, task: TaskDescription, examples: list[Example], labels: list[str] | None = None, **options: float
) -> Any:
    return make_kind(task, folder, Parts(examples, examples, None, labels or []), "gpt1_inputs", **options)


def similarity(**changes: Any) -> TaskDescription:
    return load_task("stsb")[1].model_copy(update={"max_length": 8} | changes)


def test_rows_have_start_delimiter_and_extract(tmp_path: Path) -> None:
    folder = write_gpt2(tmp_path)
    kind = make(folder, similarity(), PAIRS)

    def shown(kind: Any, example: Example) -> list[str]:
        return [kind.tokenizer.decode(ids) for ids in kind.features([example])[0]["input_ids"]]

    assert shown(kind, PAIRS[0]) == [
        "<|start|> the good film <|delimiter|> Ann met <|extract|>",
        "<|start|> Ann met <|delimiter|> the good film <|extract|>",
    ]
    # 5 tokens are left for the texts: the longer one is cut.
    assert shown(kind, PAIRS[1])[0] == "<|start|> a bad film was <|delimiter|> who <|extract|>"
    kind = make(folder, similarity(symmetric=False, max_length=32), PAIRS)
    assert len(kind.features(PAIRS)[0]["input_ids"]) == 1
    kind = make(folder, load_task("race")[1], CHOICES)
    assert shown(kind, CHOICES[0]) == [
        "<|start|> Ann met who ? <|delimiter|> Ann <|extract|>",
        "<|start|> Ann met who ? <|delimiter|> the film <|extract|>",
    ]
    task, examples = sentiment(2)
    assert shown(make(folder, task, examples, ["bad", "good"]), examples[0]) == [
        "<|start|> the film was bad . <|extract|>"
    ]


@pytest.mark.parametrize("name", ["sentiment", "similarity", "choice"])
def test_the_loss_is_that_of_the_plain_language_model(tmp_path: Path, name: str) -> None:
    """Compare with float64 logits of GPT2LMHeadModel, row by row without padding, and with its gradients."""
    from transformers import GPT2LMHeadModel

    folder = write_gpt2(tmp_path)
    task, examples = {
        "sentiment": sentiment(3),
        "similarity": (similarity(max_length=32), PAIRS),
        "choice": (load_task("race")[1], CHOICES),
    }[name]
    labels = {"sentiment": ["bad", "good"], "similarity": ["score"]}.get(name)
    kind = make(folder, task, examples, labels)
    model = kind.model(folder, load_config(folder, kind), random=False).train()
    rows = kind.features(examples).rows
    found = model(**kind.collator()(rows))
    found.loss.backward()

    plain = GPT2LMHeadModel(model.config).double()
    plain.load_state_dict(
        {name: value.double() for name, value in model.state_dict().items() if name != "score.weight"}
    )
    head = model.score.weight.detach().double()
    lm_losses, task_losses = [], []
    for row in rows:
        scores = []
        for ids in row["input_ids"]:
            output = plain(input_ids=torch.tensor([ids]), output_hidden_states=True)
            chances = output.logits[0].log_softmax(-1)
            lm_losses.append(-sum(chances[at, ids[at + 1]] for at in range(len(ids) - 1)) / (len(ids) - 1))
            scores.append(head @ output.hidden_states[-1][0, -1])
        if name == "similarity":
            task_losses.append((sum(scores)[0] - row["labels"]) ** 2)
        else:
            logits = torch.cat(scores)  # two choices, or two labels of one row
            task_losses.append(-logits.log_softmax(-1)[row["labels"]])
    expected = sum(task_losses) / len(task_losses) + 0.5 * sum(lm_losses) / len(lm_losses)
    expected.backward()
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = dict(plain.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        if parameter_name != "score.weight":
            wanted = gradients[parameter_name].grad
            assert torch.allclose(parameter.grad.double(), wanted, atol=1e-5 * wanted.abs().max().item() + 1e-9)
    assert model.transformer.wte.weight.grad[-3:].abs().sum(dim=1).min() > 0
    model.eval()
    assert model(**kind.collator()(rows)).loss.item() == pytest.approx(
        (sum(task_losses) / len(task_losses)).item(), rel=1e-5
    )


def test_a_run_learns_and_saves_what_other_classes_read(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = write_gpt2(tmp_path / "model", n_embd=32)
    task, examples = sentiment(16)
    kind = make(folder, task, examples, ["bad", "good"], lm_weight=0.1)
    sets = make_sets(kind, Parts(examples, examples, examples[:3], ["bad", "good"]))
    settings = FitSettings(Tuning(layer_decay=0.9), save_model=True, early_stopping=9)
    result = run_point(folder, kind, sets, Point(4, 1e-2, 8, 1), settings, tmp_path / "out", {})
    assert result["dev"]["accuracy"] == 1.0
    # The class of transformers for this task reads the last token too, so it needs nothing of ours.
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    ids = [row["input_ids"][0] for row in sets["dev"].rows]
    assert tokenizer.convert_ids_to_tokens(ids[0])[-1] == "<|extract|>"
    logits = np.stack([saved(input_ids=torch.tensor([one])).logits[0].detach().numpy() for one in ids])
    assert [one.value for one in kind.predict(logits, sets["dev"])] == [one.label for one in examples]
    again = make(tmp_path / "out" / "model", task, examples, ["bad", "good"])
    model = again.model(tmp_path / "out" / "model", load_config(tmp_path / "out" / "model", again), False)
    assert torch.equal(model.score.weight, saved.score.weight)
    assert torch.equal(model.transformer.wte.weight, saved.transformer.wte.weight)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write_gpt2(tmp_path / "model")
    task, examples = sentiment(4)
    kind = make(folder, task, examples, ["bad", "good"])
    for tuning in (Tuning(lora_rank=2), Tuning(layers=1), Tuning(gradual=True)):
        with pytest.raises(ConfigError, match="embeddings of the new tokens must be trained"):
            run_point(folder, kind, make_sets(kind, Parts(examples, examples, None, ["bad", "good"])),
                      Point(4, 1e-2, 1, 1), FitSettings(tuning), tmp_path / "out", {})  # fmt: skip
    with pytest.raises(ConfigError, match="a model of type bert reads in both directions"):
        make(write_bert(tmp_path / "bert"), task, examples, ["bad", "good"])
    random = kind.model(folder, load_config(folder, kind), random=True)
    assert random.get_input_embeddings().num_embeddings == len(kind.tokenizer)
