"""Mutated recipes and DeepSpeed files are accepted or refused: no traceback, no hang, no growing memory."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.recipe.check import check_config, unused_settings
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.deepspeed_rules import deepspeed_keys, rules
from ctxlm_ds.recipe.describe import all_settings
from ctxlm_ds.recipe.json_source import SHIPPED_CONFIG_DIR, load_deepspeed_json
from ctxlm_ds.recipe.load import RECIPE_DIR, dump_config, load_config, load_saved_config, shipped_recipes
from ctxlm_ds.recipe.schema import RunConfig
from tests.fuzz import INSERTS, Case, damage, run_cases

pytestmark = pytest.mark.long

PLAUSIBLE: tuple[Any, ...] = (True, False, "x", "cpu", "auto", 1, 2, 8, 64, 512, 0.1, 0.5, 1000, 5e7, {}, ["a"])
NASTY: tuple[Any, ...] = (
    None, "", "null", "\x00", "\ud800", "\u2028", "é" * 300, "a/" * 3000, "$" + "{HOME}", 0, -1, 3, 7, 2**31, 2**63,
    2**64, 10**15, 10**308, 10**310, 0.0, -0.0, 1.0, 1.5, -1.5, 1e-300, 1e300, float("inf"), float("-inf"), [],
    float("nan"), [0], [None], [[1]], ["a", "a"], {"a": 1}, {"": None}, *PLAUSIBLE, *PLAUSIBLE,
)  # fmt: skip
BITES = tuple(text.encode(errors="surrogatepass") for text in (
    "\x00", "\x07", "\x85", "\ufeff", "\ufffe", "\ud83d", "\t", "&a ", "*a ", "<<: ", "!!python/name:os.system ", "- ",
    "? ", ": ", "{", "}", "[", "]", '"', "'", "|\n", "#", "%", "\n", "\r", "---\n", "...\n", "@", "`", "=",
))  # fmt: skip


def mutate_text(text: str, draw: random.Random) -> bytes:
    """Damage a text in one to four places."""
    content = text.encode()
    for _ in range(draw.randint(1, 4)):
        content = damage(content, draw, (*INSERTS, *BITES, draw.choice(BITES) * 600))
    return content


def mutate_tree(tree: dict[str, Any], paths: list[str], draw: random.Random) -> dict[str, Any]:
    """Set a few settings to unsuitable values."""
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        *above, name = draw.choice(paths).split(".")
        holder = tree
        for part in above:
            inner = holder.get(part)
            if inner is None:
                inner = holder[part] = {}
            holder = inner if isinstance(inner, dict) else {}
        value = draw.choice(NASTY)
        holder[name] = {name: value} if draw.random() < 0.05 else value
    return tree


def bomb(draw: random.Random) -> str:
    """Return YAML whose aliases, merge keys or nesting would expand to more than a memory holds."""
    kind, width = draw.randrange(4), draw.randint(5, 20)
    if kind == 0:
        lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width) if n else '1'}]" for n in range(12)]
        return "\n".join(lines)
    if kind == 1:
        lines = [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * width)}]}}" for n in range(1, 12)]
        return "\n".join(["a0: &a0 {x: 1}", *lines])
    if kind == 2:
        return "model: " + "[" * draw.randint(10, 5000)
    return "x: " + "{a: " * draw.randint(10, 3000) + "1" + "}" * draw.randint(10, 3000)


def check_recipe(folder: Path, seed: int) -> str:
    """Check one mutated recipe as `--check` does.

    Raises:
        ConfigError: it is refused.
    """
    draw = random.Random(seed)
    path, overrides = folder / "recipe.yaml", []
    kind = draw.randrange(8)
    if kind == 0:
        path.write_text(bomb(draw))
    elif kind <= 3:
        text = (RECIPE_DIR / f"{draw.choice(shipped_recipes())}.yaml").read_text(encoding="utf-8")
        path.write_bytes(mutate_text(text, draw))
    else:
        settings = [setting.replace("[]", "") for setting in all_settings()]
        tree: dict[str, Any] = mutate_tree({"extends": draw.choice(shipped_recipes())}, settings, draw)
        if kind <= 5:
            path.write_bytes(json.dumps(tree, ensure_ascii=False).encode(errors="surrogatepass"))
        else:
            path.write_text(f"extends: {draw.choice(shipped_recipes())}\n")
            overrides = [f"{draw.choice(settings)}={draw.choice([str, json.dumps])(draw.choice(NASTY))}" for _ in "ab"]
    ranks = draw.choice([1, 1, 2, 8, 1000])
    config = load_config(path, overrides, ranks)
    check_config(config, ranks)
    unused_settings(config)
    path.write_text(dump_config(config), encoding="utf-8")
    if load_saved_config(path) != config:
        raise AssertionError("the resolved recipe reads back differently")
    return "accepted"


def check_deepspeed(folder: Path, seed: int) -> str:
    """Check one mutated DeepSpeed file as `--check` does, and write the configuration if it is accepted.

    Raises:
        ConfigError: it is refused.
    """
    draw = random.Random(seed)
    path = folder / "deepspeed.json"
    text = draw.choice(sorted(SHIPPED_CONFIG_DIR.glob("*.json"))).read_text(encoding="utf-8")
    if draw.random() < 0.2:
        path.write_bytes(mutate_text(text, draw))
    else:
        known = deepspeed_keys()
        keys = [*rules(), *sorted(known["top_level"])]
        keys += [f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "x")]
        keys += [f"{path}.{name}" for path, names in sorted(known["nested"].items()) for name in sorted(names)]
        tree = json.loads(text)
        if draw.random() < 0.2:
            tree["optimizer"] = {"type": draw.choice(["AdamW", "SGD", "Lion", "Muon", "x", 5]), "params": {}}
        text = json.dumps(mutate_tree(tree, keys, draw), ensure_ascii=False)
        path.write_bytes(text.encode(errors="surrogatepass"))
    training = {"global_batch_size": 64, "micro_batch_size": 8, "precision": draw.choice(["fp32", "fp32", "bf16"])}
    optimizer = {"name": "from_ds_config" if '"optimizer": {' in text else draw.choice(["adamw", "lamb"])}
    config = RunConfig.model_validate({"training": training, "optimizer": optimizer})
    built = build_deepspeed_config(config, load_deepspeed_json(path), draw.choice([1, 2]))
    with open(folder / "accepted.jsonl", "a") as handle:
        handle.write(json.dumps(built) + "\n")
    return "accepted"


def prepare_recipes(folder: Path) -> Case:
    return partial(check_recipe, folder)


def prepare_deepspeed(folder: Path) -> Case:
    return partial(check_deepspeed, folder)


def accepted_by_deepspeed(folder: Path) -> int:
    """Give every accepted configuration to DeepSpeed's own parser; return their number."""
    import deepspeed

    lines = (folder / "accepted.jsonl").read_text().splitlines()
    for line in lines:
        settings = json.loads(line)
        # Without a process group DeepSpeed takes the world to be one rank.
        settings["gradient_accumulation_steps"] = settings["train_batch_size"] // 8
        try:
            deepspeed.DeepSpeedConfig(settings)
        except Exception as error:
            pytest.fail(f"DeepSpeed refuses {line}: {error}")
    return len(lines)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(1000, 6000), marks=pytest.mark.soak)])
def test_mutated_recipes_end_without_a_traceback(seeds: range, tmp_path: Path) -> None:
    found = run_cases(prepare_recipes, tmp_path, seeds)
    assert min(found["accepted"], found["refused"]) > len(seeds) / 30


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(1000, 4000), marks=pytest.mark.soak)])
def test_mutated_deepspeed_files_end_without_a_traceback(seeds: range, tmp_path: Path) -> None:
    found = run_cases(prepare_deepspeed, tmp_path, seeds)
    assert min(found["accepted"], found["refused"]) > 5
    assert accepted_by_deepspeed(tmp_path) == found["accepted"]
