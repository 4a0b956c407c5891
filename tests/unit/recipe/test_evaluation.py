"""Texts and tasks of evaluations: which settings have an effect, and a task's name in the metrics."""

from __future__ import annotations

from ctxlm_ds.recipe.evaluation import DownstreamTask, EvaluationConfig


def test_settings_of_texts_are_idle_without_texts() -> None:
    idle = ("continuation_tokens", "continuation_temperature")
    assert EvaluationConfig().idle_settings == idle and not EvaluationConfig().continues
    for settings in ({"continuations": 2}, {"prompts": ["The quiet"]}):
        evaluation = EvaluationConfig.model_validate(settings)
        assert evaluation.continues and evaluation.idle_settings == ()


def test_a_task_is_named_after_its_description() -> None:
    names = [DownstreamTask(task=task, data="data", every_steps=2).name for task in ("sst2", "mine/topics.yaml")]
    assert names == ["sst2", "topics"]
