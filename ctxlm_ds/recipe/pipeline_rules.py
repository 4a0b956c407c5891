"""What a recipe's `pipeline` section must say, and what goes together with the rest of the recipe.

In: a RunConfig. Out: problems, all at once. Not here: whether files are there, recipes of further phases (cluster/).
Only slurm/pipeline.sh asks: pretraining ignores the section.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ctxlm_ds.recipe.pipeline_schema import PipelineConfig, PipelineTokenizer, StepResources
from ctxlm_ds.recipe.problems import Problem, nearest_name
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES, FORMATS

STEP_NAMES = ("tokenizer", "preprocess", "preprocess-heldout", "merge", "samples", "pretrain", "export")
PLACEHOLDERS = ("output_dir", "tokenizer", "dataset", "heldout", "run_dir", "hf_dir")
OWN_OPTIONS = {
    "job-name": "the job is known by it", "J": "the job is known by it", "output": "logs lie in OUTPUT/logs",
    "o": "logs lie in OUTPUT/logs", "dependency": "steps wait for each other by it", "d": "steps wait by it",
    "array": "set pipeline.shards", "a": "set pipeline.shards", "parsable": "it is given already",
    "kill-on-invalid-dep": "it is given already", "wrap": "the step has its script",
    "wait": "steps wait by dependencies", "W": "steps wait by dependencies",
    "chdir": "paths are those of where pipeline.sh was started",
    "D": "paths are those of where pipeline.sh was started", "requeue": "it is given already",
    "test-only": "use --dry-run", "hold": "a held step never starts", "H": "a held step never starts",
}  # fmt: skip
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")
_STEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_NUMBERED = re.compile(r"(samples|pretrain)-\d+")


def pipeline_problems(config: RunConfig) -> Iterator[Problem]:
    """Every problem of the section, without raising."""
    if config.pipeline is None:
        yield Problem(
            "pipeline", "missing: the recipe says nothing of texts or jobs; add the section (docs/pipeline.md)"
        )
        return
    for check in (_text_problems, _tokenizer_problems, _format_problems, _folder_problems, _append_problems):
        yield from check(config, config.pipeline)
    yield from _option_problems(config.pipeline)


def fill_placeholders(text: str, values: dict[str, str]) -> str:
    """`{name}` replaced where `values` has the name; other braces are the shell's."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


def splits_sentences(config: RunConfig, pipeline: PipelineConfig) -> bool:
    """Whether a sequence of the dataset is a sentence."""
    given = pipeline.split_sentences
    return config.data.by_sentence if given is None else given


def appends_eod(config: RunConfig, pipeline: PipelineConfig) -> bool:
    """Whether the separator ends each document."""
    given = pipeline.append_eod
    return config.data.ends_documents if given is None else given


def tokenizer_type(config: RunConfig, wanted: PipelineTokenizer) -> str:
    """Return the kind of tokenizer to train: the one asked for, or the one that the family was published with."""
    return wanted.type or str(FAMILIES.get(config.model.family).tokenizer)


def _text_problems(config: RunConfig, pipeline: PipelineConfig) -> Iterator[Problem]:
    data = config.data
    if not pipeline.input and not data.train:
        yield Problem("pipeline.input", "missing: name texts, or finished datasets by data.train", ("data.train",))
    if pipeline.input and data.train:
        text = "names texts, and data.train names datasets: the pipeline makes data.train itself; keep one of them"
        yield Problem("pipeline.input", text, ("data.train",))
    if pipeline.heldout and data.validation:
        text = "names texts, and data.validation names datasets; keep one of them"
        yield Problem("pipeline.heldout", text, ("data.validation",))
    if not pipeline.json_keys or len(set(pipeline.json_keys)) != len(pipeline.json_keys):
        yield Problem("pipeline.json_keys", f"{pipeline.json_keys}: name one key or more, each once")
    for name in ("shards", "shards_at_once"):
        if not pipeline.input and getattr(pipeline, name) not in (None, 1):
            text = f"{getattr(pipeline, name)} has no effect without pipeline.input"
            yield Problem(f"pipeline.{name}", text, ("pipeline.input",))


def _tokenizer_problems(config: RunConfig, pipeline: PipelineConfig) -> Iterator[Problem]:
    trained, path = pipeline.tokenizer, config.tokenizer.path
    both = ("pipeline.tokenizer", "tokenizer.path")
    if trained is None and path is None:
        text = (
            "missing: say which tokenizer to train, e.g. {vocab_size: 30522}, or name a folder by tokenizer.path"
        )
        yield Problem("pipeline.tokenizer", text, both)
    elif trained is not None and path is not None:
        yield Problem(
            "pipeline.tokenizer", f"is to be trained, and tokenizer.path names {path}; keep one of them", both
        )
    if trained is None:
        return
    if not pipeline.input:
        text = "cannot be trained without pipeline.input; name its folder by tokenizer.path"
        yield Problem("pipeline.tokenizer", text, ("pipeline.input",))
    if not trained.lowercase and tokenizer_type(config, trained) != "wordpiece":
        yield Problem(
            "pipeline.tokenizer.lowercase", "false is a setting of wordpiece alone; leave it out",
            ("pipeline.tokenizer.type", "model.family"),
        )  # fmt: skip


def _format_problems(config: RunConfig, pipeline: PipelineConfig) -> Iterator[Problem]:
    sample_format = config.data.sample_format
    if not splits_sentences(config, pipeline) and FORMATS.get(sample_format).makes_pairs:
        yield Problem(
            "pipeline.split_sentences", f"false: data.sample_format {sample_format} needs sentences; set it to true",
            ("data.sample_format",),
        )  # fmt: skip
    if not appends_eod(config, pipeline) and config.data.ends_documents:
        text = f"false: data.sample_format {sample_format} needs the end of each document; set it to true"
        yield Problem("pipeline.append_eod", text, ("data.sample_format",))


def _folder_problems(config: RunConfig, pipeline: PipelineConfig) -> Iterator[Problem]:
    folder = pipeline.output_dir or config.name
    odd = sorted({character for character in folder if character in "%\\\"'\n"})
    if odd:
        where = "pipeline.output_dir" if pipeline.output_dir else "name"
        yield Problem(where, f"{folder!r}: Slurm's log names cannot hold {' '.join(map(repr, odd))}; choose another")


def _append_problems(config: RunConfig, pipeline: PipelineConfig) -> Iterator[Problem]:
    known = {"pretrain", "samples"} | {f"{kind}-{number + 2}" for kind in ("samples", "pretrain")
                                       for number in range(len(pipeline.phases))}  # fmt: skip
    known |= {"tokenizer"} if pipeline.tokenizer else set()
    known |= {"preprocess"} if pipeline.input else set()
    known |= {"merge"} if pipeline.shards > 1 else set()
    known |= {"preprocess-heldout"} if pipeline.heldout else set()
    known |= {"export"} if pipeline.export else set()
    for index, step in enumerate(pipeline.append):
        here = f"pipeline.append[{index}]"
        if not _STEP_NAME.fullmatch(step.name):
            yield Problem(f"{here}.name", f'"{step.name}": expected letters, digits, - and _')
        elif step.name in STEP_NAMES or step.name in known or _NUMBERED.fullmatch(step.name):
            yield Problem(f"{here}.name", f'"{step.name}" is the name of another step; choose another')
        for name in step.after:
            if name not in known:
                near = nearest_name(name, known)
                hint = f"did you mean {near}? " if near else ""
                yield Problem(f"{here}.after", f'"{name}": no step before it has this name; {hint}There are: '
                              f"{', '.join(sorted(known))}")  # fmt: skip
        yield from _placeholder_problems(config, pipeline, here, step.command, "command")
        yield from _placeholder_problems(config, pipeline, here, step.output or "", "output")
        known.add(step.name)


def _placeholder_problems(
    config: RunConfig, pipeline: PipelineConfig, here: str, text: str, field: str
) -> Iterator[Problem]:
    for name in dict.fromkeys(_PLACEHOLDER.findall(text)):
        if name not in PLACEHOLDERS:
            near = nearest_name(name, PLACEHOLDERS)
            if near:
                yield Problem(f"{here}.{field}", f"{{{name}}}: did you mean {{{near}}}?")
        elif name == "hf_dir" and not pipeline.export:
            yield Problem(f"{here}.{field}", "{hf_dir}: pipeline.export is false", ("pipeline.export",))
        elif name == "heldout" and not pipeline.heldout:
            yield Problem(f"{here}.{field}", "{heldout}: there are no held-out texts", ("pipeline.heldout",))
        elif name == "dataset" and not pipeline.input:
            yield Problem(f"{here}.{field}", "{dataset}: no texts are preprocessed", ("pipeline.input",))


def _option_problems(pipeline: PipelineConfig) -> Iterator[Problem]:
    sections: list[tuple[str, StepResources]] = [(f"resources.{name}", item) for name, item in pipeline.resources]
    sections += [(f"phases[{index}].resources", phase.resources) for index, phase in enumerate(pipeline.phases)]
    sections += [(f"append[{index}].resources", step.resources) for index, step in enumerate(pipeline.append)]
    for where, resources in sections:
        for option in resources.extra:
            name = option.lstrip("-").split("=")[0]
            if not option.startswith("-"):
                text = f'"{option}": each is one word that begins with -, for example --qos=long'
                yield Problem(f"pipeline.{where}.extra", text)
            elif name in OWN_OPTIONS:
                text = f'"{option}" is the pipeline\'s own: {OWN_OPTIONS[name]}; leave it out'
                yield Problem(f"pipeline.{where}.extra", text)
