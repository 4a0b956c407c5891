"""The filter settings of a data recipe as command-line flags: one flag a field, its documentation as help.

In: an argument parser; parsed arguments. Out: flags; a recipe's filters with what the user gave laid over them.
Imports no numpy, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, get_origin

from pydantic import ValidationError

from ctxlm_ds.data.hygiene.corpora import CorpusRecipe, FilterConfig, explain
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.describe import describe_field


def add_filter_flags(parser: argparse._ActionsContainer) -> None:
    """`--min-words N`, `--exact-duplicates`, ...; a flag that is not given leaves the recipe's setting."""
    for name, field in FilterConfig.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        explanation = " ".join((field.description or "").replace("`", "").replace("%", "%%").split())
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{explanation} [{_shown(field.default)}]"}
        if field.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif get_origin(field.annotation) is list:
            parser.add_argument(flag, nargs="+", metavar="NAME", **options)
        else:
            whole = "whole number" in describe_field(field)
            parser.add_argument(flag, type=int if whole else float, metavar="N" if whole else "X", **options)


def _shown(value: object) -> str:
    return "off" if value in (None, False, []) else str(value)


def with_filter_flags(recipe: CorpusRecipe, args: argparse.Namespace) -> CorpusRecipe:
    """The recipe with the flags laid over its filters. Raises ConfigError for a value out of range."""
    given = {name: getattr(args, name) for name in FilterConfig.model_fields if hasattr(args, name)}
    whole = recipe.filters.model_dump(mode="json") | given
    try:
        filters = FilterConfig.model_validate_json(json.dumps(whole), strict=True)
    except (ValidationError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise ConfigError(str(error)) from error
        found = error.errors(include_url=False)[0]
        flag = f"--{str(found['loc'][0]).replace('_', '-')}"
        raise ConfigError(f"{flag} {found['input']}: {explain(FilterConfig, found)}") from error
    return recipe.model_copy(update={"filters": filters})
