"""DistilBERT's objective beside transformers' BertForMaskedLM and DistilBertForMaskedLM, and where the teacher runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.export.base import Tensors, export_of
from ctxlm_ds.export.hf_config import to_hf_config
from ctxlm_ds.export.safetensors_files import write_model
from ctxlm_ds.export.teacher import teacher_values
from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.parameters import initialize_parameters
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.training.engine.losses import TermLosses
from tests.families import runs
from tests.families.hugging_face import whole_batch
from tests.families.runs import STEPS, Layout, Run
from tests.families.test_contract import Results

pytestmark = pytest.mark.dist
NAME = "distilbert+teacher"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("distillation"))


def ours_with_teacher(config: RunConfig, noise: float) -> LayerSequence:
    """Student and teacher in one list, the student's weights with `noise`."""
    objective = build_objective(config.objective)
    kernels = KernelSet(dict(config.kernels), "cpu", torch.float32)
    build = ModelBuild((*objective.outputs, *objective.taps), kernels, shares_rows=config.data.shares_rows)
    model, given = (
        build_program(config.model, build, objective, config.teacher).module(),
        teacher_values(str(config.teacher.path)),
    )
    initialize_parameters(model, 1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("teacher."):
                parameter.copy_(given(name)).requires_grad_(False)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return model


def written_student(config: RunConfig, model: LayerSequence, folder: Path) -> torch.nn.Module:
    """DistilBertForMaskedLM with the student's weights, in float64 and without dropout."""
    export, tokenizer = export_of("distilbert"), load_tokenizer(config.tokenizer.path)
    own = {name: value.detach() for name, value in model.named_parameters() if not name.startswith("teacher.")}
    key_map = export.key_map(config.model, ("predicted_logits",), tokenizer.pad_id)
    folder.mkdir()
    write_model(folder, key_map, Tensors(own))
    to_hf_config(export, config.model, key_map.hf_class, tokenizer, "fp32").to_json_file(folder / "config.json")
    return transformers.DistilBertForMaskedLM.from_pretrained(folder).double().eval()


def their_loss(student: Any, teacher: Any, fields: dict[str, Tensor], config: RunConfig) -> Tensor:
    """The loss of distiller.py, over complete rows of transformers' classes."""
    objective, mask = config.objective, fields["sequence_ids"] > 0
    ours, theirs = (
        model(input_ids=fields["input_ids"], attention_mask=mask.long(), output_hidden_states=True)
        for model in (student, teacher)
    )
    labels = torch.full_like(fields["input_ids"], IGNORE_LABEL)
    rows, slots = (fields["masked_lm_labels"] != IGNORE_LABEL).nonzero(as_tuple=True)
    labels[rows, fields["prediction_positions"][rows, slots]] = fields["masked_lm_labels"][rows, slots]
    chosen = mask if objective.soft_targets == "tokens" else labels != IGNORE_LABEL
    heat = objective.temperature
    soft = F.kl_div(
        F.log_softmax(ours.logits[chosen] / heat, -1), F.softmax(theirs.logits[chosen] / heat, -1),
        reduction="batchmean",
    ) * heat**2  # fmt: skip
    masked = F.cross_entropy(ours.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL)
    last = ours.hidden_states[-1][mask], theirs.hidden_states[-1][mask]
    cosine = F.cosine_embedding_loss(*last, torch.ones(len(last[0]), dtype=torch.float64))
    return 5.0 * soft + 2.0 * masked + 1.0 * cosine


def compare(rank: int, world_size: int, run: Run, soft_targets: str, folder: Path) -> dict[str, Any]:
    """Case: our loss and gradients, and those of transformers' classes in float64."""
    config = run.config()
    section = config.objective.model_copy(update={"soft_targets": soft_targets})
    config = config.model_copy(update={"objective": section})
    fields, counts = whole_batch(run, 0)
    if soft_targets == "masked":
        fields = {**fields, "soft_target_labels": fields["masked_lm_labels"]}
        counts = counts | {"soft_targets": counts["masked_lm"]}
    model = ours_with_teacher(config, noise=0.1).train()
    objective = build_objective(config.objective)
    factors = torch.tensor([term.weight / counts[term.name] for term in objective.terms])
    loss, _ = TermLosses(objective.terms, objective.tensors, ParallelContext())(model.run(fields), fields, factors)
    loss.backward()
    student = written_student(config, model, folder)
    teacher = transformers.BertForMaskedLM.from_pretrained(config.teacher.path).double().eval()
    wanted = their_loss(student, teacher, fields, config)
    wanted.backward()
    theirs = dict(student.named_parameters())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    key_map = export_of("distilbert").key_map(config.model, ("predicted_logits",), 0)
    pairs = {row.ours: (gradients.pop(row.ours), row.to_ours(lambda name: theirs[name].grad)) for row in key_map.rows}
    assert not gradients
    largest = {name: float((got - want).abs().max() / want.abs().max()) for name, (got, want) in pairs.items()}
    return {"loss": float(loss), "wanted": float(wanted), "gradients": largest}


@pytest.mark.parametrize("soft_targets", ["tokens", "masked"])
def test_loss_and_gradients_are_those_of_distiller_py(results: Results, soft_targets: str, tmp_path: Path) -> None:
    found = results.of(compare, results.run(NAME, alone=True), soft_targets, tmp_path / "student")
    assert found["loss"] == pytest.approx(found["wanted"], rel=1e-6)
    assert {name: value for name, value in found["gradients"].items() if value > 1e-5} == {}


def train_with(rank: int, world_size: int, run: Run, precision: str, teacher: dict[str, str]) -> dict[str, Any]:
    """Case: losses with other settings of the teacher, its types, and whether it has changed."""
    with pytest.MonkeyPatch.context() as patch:
        config = run.config()
        changed = {
            "teacher": config.teacher.model_copy(update=teacher),
            "training": config.training.model_copy(update={"precision": precision}),
        }
        patch.setattr(Run, "config", lambda _: config.model_copy(update=changed))
        engine = runs.build(run)
        before = {name: value.detach().clone() for name, value in engine._frozen.items()}
        figures = runs.advance(engine, run, range(STEPS))
        same = all(torch.equal(value, before[name]) for name, value in engine._frozen.items())
        types = {value.dtype for value in engine._frozen.values()}
        stage = engine.topology.pipeline_parallel_rank
        return {**figures, "same": same, "types": types, "names": list(engine._frozen), "stage": stage}


def trained(results: Results, layout: Layout, run_precision: str = "fp32", **teacher: str) -> list[dict[str, Any]]:
    run = results.run(NAME).on(layout)
    return results.groups.run(train_with, layout.world_size, run, run_precision, teacher)


def test_a_teacher_on_the_last_stage_gives_the_same_numbers(results: Results) -> None:
    wanted = results.of(runs.train, results.run(NAME))
    for placement in ("last", "spread"):
        found = trained(results, Layout(pipeline=2, tensor=2, stage=1), placement=placement)
        for rank in found:
            assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-5) and rank["same"]
        stages = {rank["stage"] for rank in found if rank["names"]}
        assert stages == ({1} if placement == "last" else {0, 1})


@pytest.mark.parametrize("layout", [Layout(stage=2), Layout(pipeline=2, stage=1)], ids=str)
@pytest.mark.parametrize(("precision", "theirs"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "run")])
def test_the_teacher_has_a_precision_apart(results: Results, layout: Layout, precision: str, theirs: str) -> None:
    wanted = results.of(runs.train, results.run(NAME))["losses"]
    for rank in trained(results, layout, precision, precision=theirs):
        assert rank["losses"] == pytest.approx(wanted, rel=3e-2) and rank["losses"] != wanted
        assert rank["types"] == {DTYPES[precision if theirs == "run" else theirs]} and rank["same"]
