"""Settings that the installed DeepSpeed reads, for comparison with the shipped list.

The keys come from DeepSpeed's config code: this module follows the dictionary through that code (`ast` only), from
`DeepSpeedConfig.__init__` on. Types and ranges come from its pydantic models, parameters of optimizers from their
signatures. `python -m tests.deepspeed_source` writes the list for a new release.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_origin

from ctxlm_ds.recipe.deepspeed_rules import KEYS_FILE, DeepSpeedKeys, KeyPath
from ctxlm_ds.training.optimizers.from_ds_config import ELEMENTWISE

Value = KeyPath | str | frozenset[str] | None
"""What an expression stands for: the dictionary at a path, a text, one of several texts, or nothing known."""

ROOT_CLASS = "DeepSpeedConfig"
READ_BY_INITIALIZE = frozenset({"data_parallel_size"})
"""Read by deepspeed.initialize before it makes its config."""
CLOSED_SECTIONS = (
    "optimizer",
    "scheduler",
    "flops_profiler",
    "activation_checkpointing",
    "data_types",
    "torch_autocast",
    "timers",
)
"""Sections that DeepSpeed reads key by key without refusing others."""


def installed_keys() -> DeepSpeedKeys:
    """Read the keys, values and optimizers of the installed DeepSpeed."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.submodule_search_locations
    keys = read_keys(Path(next(iter(spec.submodule_search_locations))))
    return dataclasses.replace(keys, values=installed_values(), optimizers=installed_optimizers())


def installed_values() -> dict[str, dict[str, Any]]:
    """Read types and ranges from DeepSpeed's pydantic models."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "bf16": DeepSpeedBF16Config, "comet": CometConfig, "comms_logger": CommsLoggerConfig, "compile": CompileConfig,
        "csv_monitor": CSVConfig, "fp16": DeepSpeedFP16Config, "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig, "tensorboard": TensorBoardConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig, "wandb": WandbConfig,
        "weight_quantization": WeightQuantConfig, "zero_optimization": DeepSpeedZeroConfig,
    }  # fmt: skip
    return dict(sorted(value for path, model in models.items() for value in _model_values(path, model)))


def _model_values(path: str, model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in model.model_fields.items():
        types = [one for one in get_args(field.annotation) or (field.annotation,) if one is not type(None)]
        kind = field.annotation if get_origin(field.annotation) is list else types[0]
        inner = getattr(kind, "model_fields", None)
        rule: dict[str, Any] = {"null": True} if len(types) < len(get_args(field.annotation)) else {}
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            rule["values"] = list(dict.fromkeys(item.value for item in kind))
        elif isinstance(kind, str):
            rule["values"] = types
        elif kind in (bool, int, float, str, list, Path):
            rule["type"] = "str" if kind is Path else kind.__name__
        elif inner is None:
            continue
        for item in field.metadata:
            rule |= {bound: getattr(item, bound) for bound in ("gt", "ge", "lt", "le") if hasattr(item, bound)}
        for own in filter(None, (name, field.alias)):
            yield from _model_values(f"{path}.{own}", kind) if inner else [(f"{path}.{own}", rule)]


def installed_optimizers() -> dict[str, list[str]]:
    """Read the parameters of torch's and DeepSpeed's optimizers."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    def names(*classes: type) -> list[str]:
        found = [list(inspect.signature(one).parameters)[1:] for one in classes]
        return [name for name in found[0] if all(name in other for other in found)]

    torch_names = {kind: names(getattr(torch.optim, kind)) for kind in ELEMENTWISE if kind != "Lion"}
    adam = [name for name in names(FusedAdam, DeepSpeedCPUAdam) if name != "amsgrad"]
    return torch_names | {
        "Lion": names(FusedLion, DeepSpeedCPULion),
        "adam": [*adam, "adam_w_mode", "fp32_optimizer_states", "torch_adam"],
        "torch_adam": [*torch_names["AdamW"], "adam_w_mode", "torch_adam"],
    }


def read_keys(package: Path) -> DeepSpeedKeys:
    """Follow the configuration through DeepSpeed's source.

    Raises:
        OSError, SyntaxError, LookupError: the source is not as expected.
    """
    follower = _Follower(package)
    module = follower.module(package / "runtime" / "config.py")
    follower.call_class(module, module.classes[ROOT_CLASS], [None, ()], {})
    nested: dict[KeyPath, frozenset[str]] = {
        (name,): frozenset(path[1] for path in follower.reads if len(path) == 2 and path[0] == name)
        for name in CLOSED_SECTIONS
    }
    for path, (model_module, model) in follower.models.items():
        nested.update(follower.model_fields(model_module, model, path))
    removed: dict[KeyPath, str] = {}
    for section, table in ((), "_REMOVED_TOP_LEVEL_CONFIG_KEYS"), (("zero_optimization",), "_REMOVED_ZERO_CONFIG_KEYS"):
        removed |= {(*section, key): text for key, text in module.texts_of(table).items()}
    top_level = {path[0] for path in follower.reads} - {path[0] for path in removed if len(path) == 1}
    return DeepSpeedKeys(frozenset(top_level | READ_BY_INITIALIZE), nested, removed, {}, {})


class _Module:
    """The top level of one source file."""

    def __init__(self, path: Path, package: Path) -> None:
        self.texts: dict[str, str] = {}
        self.assigned: dict[str, ast.expr] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.imports: dict[str, tuple[Path, str]] = {}
        self.stars: list[Path] = []
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self.assigned[statement.targets[0].id] = statement.value
                if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                    self.texts[statement.targets[0].id] = statement.value.value
            elif isinstance(statement, ast.FunctionDef):
                self.functions[statement.name] = statement
            elif isinstance(statement, ast.ClassDef):
                self.classes[statement.name] = statement
            elif isinstance(statement, ast.ImportFrom):
                self._add_import(statement, path, package)

    def _add_import(self, statement: ast.ImportFrom, path: Path, package: Path) -> None:
        source = _imported_file(statement, path, package)
        if source is None:
            return
        for alias in statement.names:
            if alias.name == "*":
                self.stars.append(source)
            else:
                self.imports[alias.asname or alias.name] = (source, alias.name)

    def texts_of(self, name: str) -> dict[str, str]:
        """A module-level dict of texts; formatted parts are filled from the module's own texts."""
        node = self.assigned.get(name)
        if not isinstance(node, ast.Dict):
            return {}
        return {
            key.value: " ".join(self._text(value).split())
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        }

    def _text(self, node: ast.expr) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(self._text(part) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self._text(node.value)
        if isinstance(node, ast.Name):
            return self.texts.get(node.id, "")
        return str(node.value) if isinstance(node, ast.Constant) else ""


def _imported_file(statement: ast.ImportFrom, path: Path, package: Path) -> Path | None:
    parts = (statement.module or "").split(".") if statement.module else []
    if statement.level:
        folder = path.parent
        for _ in range(statement.level - 1):
            folder = folder.parent
    elif parts[:1] == ["deepspeed"]:
        folder, parts = package, parts[1:]
    else:
        return None
    target = folder.joinpath(*parts)
    for candidate in (target.with_suffix(".py"), target / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


class _Follower:
    """Walks functions with the dictionary's path bound to their parameters, and notes every key that is read."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.reads: set[KeyPath] = set()
        self.models: dict[KeyPath, tuple[_Module, ast.ClassDef]] = {}
        self._modules: dict[Path, _Module] = {}
        self._seen: dict[tuple[int, tuple[tuple[str, Value], ...]], Value] = {}

    def module(self, path: Path) -> _Module:
        if path not in self._modules:
            self._modules[path] = _Module(path, self.package)
        return self._modules[path]

    def find(self, module: _Module, name: str) -> tuple[_Module, ast.FunctionDef | ast.ClassDef | str] | None:
        """A name of a module: a function, a class or a text, where it is defined."""
        local = module.functions.get(name) or module.classes.get(name) or module.texts.get(name)
        if local is not None:
            return module, local
        if name in module.imports:
            source, original = module.imports[name]
            return self.find(self.module(source), original)
        for source in module.stars:
            found = self.find(self.module(source), name)
            if found is not None:
                return found
        return None

    def call_class(self, module: _Module, node: ast.ClassDef, values: list[Value], named: dict[str, Value]) -> None:
        """Follow a class's constructor."""
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                _Body(self, module, node).run(item, values, named)

    def call_function(
        self,
        module: _Module,
        node: ast.FunctionDef,
        owner: ast.ClassDef | None,
        values: list[Value],
        named: dict[str, Value],
    ) -> Value:
        """Follow a function; gives the path that it returns, if any."""
        bound = tuple((str(index), value) for index, value in enumerate(values)) + tuple(sorted(named.items()))
        key = (id(node), bound)
        if key not in self._seen:
            self._seen[key] = None
            self._seen[key] = _Body(self, module, owner).run(node, values, named)
        return self._seen[key]

    def model_fields(self, module: _Module, node: ast.ClassDef, path: KeyPath) -> dict[KeyPath, frozenset[str]]:
        """Names and aliases of a pydantic class's fields, and those of the classes it holds."""
        names: set[str] = set()
        nested: dict[KeyPath, frozenset[str]] = {}
        for item in node.body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            own = {item.target.id}
            if isinstance(item.value, ast.Call):
                own |= {
                    str(keyword.value.value)
                    for keyword in item.value.keywords
                    if keyword.arg == "alias" and isinstance(keyword.value, ast.Constant)
                }
            names |= own
            for part in ast.walk(item.annotation):
                found = self.find(module, part.id) if isinstance(part, ast.Name) else None
                if found is not None and isinstance(found[1], ast.ClassDef) and _is_model(found[1]):
                    for name in own:
                        nested.update(self.model_fields(found[0], found[1], (*path, name)))
        nested[path] = frozenset(names)
        return nested


def _is_model(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "DeepSpeedConfigModel" for base in node.bases)


class _Body:
    """One function's statements, in order, with what its names stand for."""

    def __init__(self, follower: _Follower, module: _Module, owner: ast.ClassDef | None) -> None:
        self.follower = follower
        self.module = module
        self.owner = owner
        self.names: dict[str, Value] = {}

    def run(self, node: ast.FunctionDef, values: list[Value], named: dict[str, Value]) -> Value:
        parameters = [argument.arg for argument in node.args.args]
        for name, default in zip(reversed(parameters), reversed(node.args.defaults), strict=False):
            self.names[name] = self.value(default)
        self.names.update(zip(parameters, values, strict=False))
        self.names.update(named)
        returned: Value = None
        for statement in ast.walk(ast.Module(body=node.body, type_ignores=[])):
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                value = self.value(statement.value)
                if value is not None:
                    self.names[statement.targets[0].id] = value
            elif isinstance(statement, (ast.For, ast.comprehension)) and isinstance(statement.target, ast.Name):
                self.names[statement.target.id] = self.value(statement.iter)
            elif isinstance(statement, ast.Return) and statement.value is not None:
                returned = returned if returned is not None else self.value(statement.value)
        for expression in ast.walk(ast.Module(body=node.body, type_ignores=[])):
            if isinstance(expression, (ast.Call, ast.Subscript, ast.Compare)):
                self.value(expression)
        return returned

    def value(self, node: ast.expr) -> Value:
        """What an expression stands for; notes the keys that it reads."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return () if node.attr == "_param_dict" else None
        if isinstance(node, (ast.Tuple, ast.List)):
            items = [item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            return frozenset(items) if items else None
        if isinstance(node, ast.Subscript):
            return self._read(self.value(node.value), self.value(node.slice))
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            self._read(self.value(node.comparators[0]), self.value(node.left))
            return None
        return self._call(node) if isinstance(node, ast.Call) else None

    def _name(self, name: str) -> Value:
        if name in self.names:
            return self.names[name]
        found = self.follower.find(self.module, name)
        return found[1] if found is not None and isinstance(found[1], str) else None

    def _read(self, holder: Value, key: Value) -> Value:
        if not isinstance(holder, tuple) or not isinstance(key, (str, frozenset)):
            return None
        keys = [key] if isinstance(key, str) else sorted(key)
        self.follower.reads.update((*holder, name) for name in keys)
        return (*holder, keys[0])

    def _call(self, node: ast.Call) -> Value:
        values = [self.value(argument) for argument in node.args]
        named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}
        if isinstance(node.func, ast.Attribute):
            return self._call_attribute(node.func, values, named)
        if not isinstance(node.func, ast.Name):
            return None
        found = self.follower.find(self.module, node.func.id)
        if found is None or isinstance(found[1], str):
            return None
        if isinstance(found[1], ast.ClassDef):
            for keyword in node.keywords:
                path = self.value(keyword.value) if keyword.arg is None else None
                if isinstance(path, tuple) and path:
                    self.follower.models[path] = (found[0], found[1])
            if any(isinstance(value, tuple) for value in values):
                self.follower.call_class(found[0], found[1], [None, *values], named)
            return None
        if any(isinstance(value, tuple) for value in [*values, *named.values()]):
            return self.follower.call_function(found[0], found[1], None, values, named)
        return None

    def _call_attribute(self, func: ast.Attribute, values: list[Value], named: dict[str, Value]) -> Value:
        if func.attr in ("copy", "deepcopy") and values:
            return values[0]
        if isinstance(func.value, ast.Name) and func.value.id == "self" and self.owner is not None:
            for item in self.owner.body:
                if isinstance(item, ast.FunctionDef) and item.name == func.attr:
                    return self.follower.call_function(self.module, item, self.owner, [None, *values], named)
            return None
        holder = self.value(func.value)
        if func.attr in ("keys", "items", "values", "copy"):
            return holder if func.attr in ("keys", "copy") else None
        return self._read(holder, values[0]) if func.attr in ("get", "pop") and values else None


def write() -> None:
    """Write the shipped list from the installed DeepSpeed."""
    keys = installed_keys()
    values = {
        "deepspeed": version("deepspeed"),
        "top_level": sorted(keys.top_level),
        "nested": {".".join(path): sorted(names) for path, names in sorted(keys.nested.items())},
        "removed": {".".join(path): text for path, text in sorted(keys.removed.items())},
        "values": keys.values,
        "optimizers": keys.optimizers,
    }
    # One line per rule.
    indented = json.dumps(values, indent=1)
    text = re.sub(r"\{\s+([^{}\[\]]*?)\s+\}", lambda match: f"{{{' '.join(match[1].split())}}}", indented)
    KEYS_FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
