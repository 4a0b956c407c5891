"""What every family of the registry keeps to; it brings its `tiny()` and nothing else.

Cases run in ranks that live on (groups.py). Rows come from the real data route: a tokenizer of the family's type, a
dataset, a sample index, the loader (runs.py).

Layouts are chosen by parts: a recipe that brings one runs under all that split the model, and is saved and resumed; a
variant of such recipes runs in two stages. `make soak` runs the rest, and layouts without dropout.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.parallel.parameters import Constant
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES, FORMATS, OBJECTIVES
from ctxlm_ds.training.measure import describe
from tests.dist.runner import SHARED, Groups
from tests.families import hugging_face, packages, runs
from tests.families.runs import ONE_RANK, STEPS, TRAINING_STEPS, Layout, Run

pytestmark = pytest.mark.dist
SHIPPED = FAMILIES.shipped_names() if packages.families is None else packages.families
"""Families of this package, or with `--package` those of the other one."""
RECIPES = [*SHIPPED, *runs.OTHERS]
VARIANTS = (
    "roberta", "xlm_roberta", "megatron_bert", "distilbert", "tinybert", "tinybert+teacher", "gpt1", "mbart",
    "bart+mass", "t5+1.1", "xlnet",
)  # fmt: skip
"""Recipes of which other recipes use every layer."""
FIRST = [name for name in RECIPES if name not in VARIANTS]
EVERY_STAGE = ("bert", "t5") if packages.families is None else RECIPES
"""Recipes whose runs show what DeepSpeed's ZeRO stages do to any model."""
MUON = ("llama", "albert") if packages.families is None else SHIPPED
"""Families with gated matrices, and with joint ones that several layers share."""
EXPORTED = [name for name in SHIPPED if FAMILIES.get(name).export]
MODEL_PARALLEL = [
    Layout(tensor=2, stage=1), Layout(pipeline=2, recompute=True),
    Layout(tensor=2, pipeline=2, stage=1, sequence_parallel=True),
]  # fmt: skip
_, IN_STAGES, COMBINED = MODEL_PARALLEL
LAYOUTS = [*MODEL_PARALLEL, Layout(pipeline=2, stage=1), *(Layout(data=2, stage=stage) for stage in (1, 2, 3))]
SHARDED = Layout(data=2, stage=3)
OTHER_SEED = 4321
MOST_DIFFERENCE = 1e-5
"""Of two layouts, as the root mean square over a tensor; an update of AdamW is 5e-3. Single weights, whose gradients
are about as small as their rounding, may differ by more."""


def case(chosen: bool, *values: Any) -> Any:
    """A case of every run of the tests, or only of `make soak`."""
    return pytest.param(*values, marks=[] if chosen else pytest.mark.soak, id="-".join(map(str, values)))


def is_chosen(family: str, layout: Layout) -> bool:
    """Whether a family runs under a layout in every run of the tests."""
    return layout == IN_STAGES or family in EVERY_STAGE or (family in FIRST and layout in MODEL_PARALLEL)


every_family = pytest.mark.parametrize("family", SHIPPED)
every_recipe = pytest.mark.parametrize("family", RECIPES)
first_recipe = pytest.mark.parametrize("family", [case(name in FIRST, name) for name in RECIPES])
exported = pytest.mark.parametrize("family", [*EXPORTED, *(name for name in runs.VERSIONS if name in RECIPES)])


class Results:
    """What cases gave, each run once, by function and arguments."""

    def __init__(self, folder: Path, groups: Groups = SHARED) -> None:
        self.folder = folder
        self.groups = groups
        self._found: dict[Any, Any] = {}

    def run(self, family: str, **changes: Any) -> Run:
        """A family on one rank without dropout, its rows recorded."""
        run = Run(family, self.folder, **changes)
        self.of(runs.prepare, Run(family, self.folder, alone=run.alone))
        return run

    def of(self, fn: Any, run: Run, *args: Any) -> Any:
        """The result of rank 0."""
        key = (fn, run, *args)
        if key not in self._found:
            self._found[key] = self.groups.run(fn, run.layout.world_size, run, *args)[0]
        return self._found[key]

    def on(self, run: Run, layout: Layout) -> Any:
        """The first steps under a layout; under COMBINED of a run that was saved after them, in `saves`."""
        if layout == COMBINED and run.dropout and run.family in FIRST:
            return self.of(runs.save, run.on(layout), self.saves(run))
        return self.of(runs.train, run.on(layout))

    def saves(self, run: Run) -> Path:
        """The folder of a run's checkpoint."""
        return self.folder / "saved" / run.family

    def exported(self, run: Run) -> Any:
        """Differences between an export and what transformers makes of it, and between it and what it is read as."""
        return self.of(hugging_face.compare, run, self.folder / "exported" / run.family)

    def reference(self, run: Run) -> Any:
        """TRAINING_STEPS steps."""
        return self.of(runs.train, run, TRAINING_STEPS)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("families"))


def assert_same_steps(got: Any, wanted: Any) -> None:
    """Losses and gradient norms of the first steps, and the weights after them, to rounding; initial ones bitwise."""
    for figure in ("losses", "norms"):
        assert got[figure][:STEPS] == pytest.approx(wanted[figure][:STEPS], rel=1e-5)
    assert [name for name, value in wanted["initial"].items() if not torch.equal(got["initial"][name], value)] == []
    assert differences(got["weights"], wanted["weights"], STEPS) == []


def differences(got: Mapping[str, Any], wanted: Mapping[str, Any], step: int) -> list[str]:
    """Tensors that differ by more than rounding, each with the step after which it does."""
    found = {name: (got[name] - value).square().mean().sqrt().item() for name, value in wanted.items()}
    return [
        f"{name} after step {step}: {difference:.1e} (root mean square)"
        for name, difference in found.items()
        if not difference <= MOST_DIFFERENCE
    ]


@exported
def test_outputs_and_gradients_are_those_of_transformers(results: Results, family: str) -> None:
    found = results.exported(results.run(family, alone=True))
    assert found["outputs"].keys() == set(OBJECTIVES.get(runs.tiny_of(family)["objective"]["name"]).outputs)
    assert {name: value for name, value in found["outputs"].items() if value > 1e-5} == {}
    assert {name: value for name, value in found["gradients"].items() if value > 1e-4} == {}


@exported
def test_training_is_that_of_transformers_and_torch(results: Results, family: str, tmp_path: Path) -> None:
    run = results.run(family, alone=True)
    wanted = results.of(hugging_face.train_theirs, run, tmp_path / "model")
    shared = run.config() == results.run(family).config()
    got = results.reference(results.run(family) if shared else run)
    assert got["losses"][: len(wanted)] == pytest.approx(wanted, rel=1e-4)


@exported
def test_an_exported_folder_is_read_back_bit_for_bit(results: Results, family: str) -> None:
    found = results.exported(results.run(family, alone=True))
    assert [name for name, same in found["read_back"].items() if not same] == []


@pytest.mark.parametrize("dropout", [case(True, "dropout"), case(False, "plain")])
@pytest.mark.parametrize(
    ("family", "layout"), [case(is_chosen(name, layout), name, layout) for name in RECIPES for layout in LAYOUTS]
)
def test_a_layout_gives_the_numbers_of_one_rank(results: Results, family: str, layout: Layout, dropout: str) -> None:
    run = results.run(family, dropout=dropout == "dropout")
    assert_same_steps(results.on(run, layout), results.of(runs.train, run))


@pytest.mark.parametrize("family", [case(name in MUON, name) for name in SHIPPED])
def test_muon_orthogonalizes_whole_matrices(results: Results, family: str) -> None:
    """Ranks that hold shards of a matrix, and of one that two stages share, give it the update that one rank gives."""
    run = results.run(family, optimizer="muon")
    wanted, adamw = results.of(runs.train, run), results.reference(results.run(family))
    matrices = {name for name, facts in wanted["facts"].items() if facts.matrix}
    if packages.families is not None and not matrices:
        pytest.skip("Muon trains it as AdamW does: none of its parameters is declared with matrix=True")
    assert matrices and not [name for name in matrices if torch.equal(wanted["weights"][name], adamw["weights"][name])]
    assert_same_steps(results.of(runs.train, run.on(COMBINED)), wanted)


@first_recipe
def test_dropout_changes_the_losses_of_what_drops(results: Results, family: str) -> None:
    run = results.run(family, dropout=True)
    plain = results.reference(results.run(family))["losses"][:STEPS]
    assert (results.of(runs.train, run)["losses"] != pytest.approx(plain, rel=1e-4)) == run.config().model.drops


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        case(name in FIRST and (layout == ONE_RANK or name in EVERY_STAGE), name, layout)
        for name in RECIPES
        for layout in (SHARDED, ONE_RANK)
    ],
)
def test_a_run_goes_on_under_another_layout(results: Results, family: str, layout: Layout) -> None:
    run = results.run(family, dropout=True)
    saved = results.of(runs.save, run.on(COMBINED), results.saves(run))
    resumed = results.of(runs.resume, run.on(layout), results.saves(run))
    assert resumed["state"].step == STEPS
    for states in ("weights", "moments"):
        assert resumed[states].keys() == saved[states].keys()
        assert [n for n, value in saved[states].items() if not torch.equal(resumed[states][n], value)] == []
    assert resumed["next"] == pytest.approx(saved["next"], rel=1e-5)
    assert differences(resumed["last"], saved["last"], 2 * STEPS) == []


@every_recipe
def test_the_planner_counts_what_is_built(results: Results, family: str) -> None:
    run = results.run(family)
    built = results.reference(run)
    whole = describe(run.config())
    assert whole.shapes == {name: tuple(shape) for name, shape in built["all_shapes"].items()}
    assert whole.num_parameters == sum(built["built"].values())
    counted, planned = results.of(runs.count_flops, run)
    assert planned == counted > 0
    assert built["facts"].keys() == built["built"].keys()


@first_recipe
def test_every_parameter_has_its_own_initial_value(results: Results, family: str) -> None:
    """Values that are not constant are drawn by seed and name."""
    run = results.run(family)
    built, other = results.reference(run), results.of(runs.initial, results.run(family, seed=OTHER_SEED))
    drawn = {name for name in built["initial"] if not isinstance(built["facts"][name].init, Constant)}
    assert drawn == {name for name, value in built["initial"].items() if not torch.equal(other[name], value)}
    assert len({built["initial"][name].flatten()[0].item() for name in drawn}) == len(drawn)


@every_recipe
def test_the_tiny_recipe_trains(results: Results, family: str) -> None:
    losses = results.reference(results.run(family))["losses"]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), losses


def layers_of(name: str) -> set[Any]:
    """The classes of a tiny recipe's layers."""
    sections = runs.tiny_of(name)
    model = sections["model"] | {"vocab_size": 300}
    config = RunConfig.model_validate({"model": model, "objective": sections["objective"], "data": sections["data"]})
    return {layer.factory for layer in describe(config).layers}


def test_a_variant_has_no_layer_of_its_own() -> None:
    layers = {name: layers_of(name) for name in RECIPES if "teacher" not in runs.tiny_of(name)}
    known = set().union(*(layers[name] for name in layers if name in FIRST))
    assert {name: found - known for name, found in layers.items() if found - known} == {}


def tiny_config(family: str, objective: str, sample_format: str, **parallel: int) -> RunConfig:
    """The family's tiny model with any objective and sample format."""
    tiny = FAMILIES.get(family).tiny()
    return RunConfig.model_validate(
        {
            "model": tiny["model"],
            "objective": {"name": objective},
            "data": {"sample_format": sample_format, "seq_length": tiny["data"]["seq_length"]},
            "parallel": parallel,
        }
    )


@every_family
def test_what_does_not_go_together_is_refused_with_what_does(family: str) -> None:
    outputs = FAMILIES.get(family).outputs
    for name, sample_format in itertools.product(OBJECTIVES.shipped_names(), FORMATS.shipped_names()):
        objective, rows = OBJECTIVES.get(name), FORMATS.get(sample_format)
        fits = set(objective.outputs) <= outputs and objective.shifted == rows.shifted
        lanes = rows.lane_directions, objective.lane_directions
        fits = fits and (lanes[0] == lanes[1] or lanes == (0, 1))
        config = tiny_config(family, name, sample_format)
        if fits and objective.sequence_label in (None, rows.sequence_label):
            check_config(config, None)
        else:
            with pytest.raises(ConfigError, match=r"set (objective\.name|model\.family|data\.sample_format) to \w+"):
                check_config(config, None)


@every_family
def test_impossible_layouts_are_refused(family: str) -> None:
    tiny = FAMILIES.get(family).tiny()
    names = tiny["objective"]["name"], tiny["data"]["sample_format"]
    section = tiny_config(family, *names).model
    sizes = [size for size in range(2, 100) if any(section.tensor_parallel_problems(size))]
    for size in sizes[:1]:
        with pytest.raises(ConfigError, match=rf"parallel\.tensor_parallel_size: {size} .*would do"):
            check_config(tiny_config(family, *names, tensor_parallel_size=size), None)
    stages = section.num_blocks + 1
    with pytest.raises(ConfigError, match=rf"parallel\.pipeline_parallel_size: {stages} "):
        check_config(tiny_config(family, *names, pipeline_parallel_size=stages), None)
