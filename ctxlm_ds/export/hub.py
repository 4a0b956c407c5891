"""Exported folders on the Hugging Face Hub: what their model cards say in addition, and the upload."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ctxlm_ds.errors import ConfigError, ExportError

CARD = "README.md"
LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
LANGUAGE = re.compile(r"[a-z]{2,3}|multilingual")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a run does not record, for the header of a model card."""

    license: str | None = None
    """The Hub's identifier, such as `apache-2.0`."""
    languages: tuple[str, ...] = ()
    """ISO 639 codes, or `multilingual`."""
    datasets: tuple[str, ...] = ()
    """Names of data sets on the Hub."""

    def check(self) -> None:
        """Raise ConfigError for a license or language that the Hub would not understand."""
        if self.license is not None and not LICENSE.fullmatch(self.license):
            raise ConfigError(f"--license {self.license}: give the Hub's name of it, such as apache-2.0")
        for language in self.languages:
            if not LANGUAGE.fullmatch(language):
                raise ConfigError(f"--language {language}: give an ISO 639 code, such as en, or multilingual")


def add_facts(folder: Path, facts: CardFacts) -> None:
    """Write facts into the header of the folder's model card; facts that are not given stay as they are.

    Raises:
        ExportError: the folder has no model card.
    """
    from huggingface_hub import ModelCard

    if facts == CardFacts():
        return
    if not (folder / CARD).is_file():
        raise ExportError(f"{folder} has no model card ({CARD}) for a license, languages or data sets")
    card = ModelCard.load(folder / CARD)
    card.data.license = facts.license or card.data.license
    card.data.language = list(facts.languages) or card.data.language
    card.data.datasets = list(facts.datasets) or card.data.datasets
    card.save(folder / CARD)


def check_push(name: str) -> None:
    """Refuse an upload that cannot succeed, before the conversion.

    Raises:
        ConfigError: the Hub has no such names, or there is no token.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push {name}: give USER/MODEL ({error})") from error
    if get_token() is None:
        raise ConfigError(f"--push {name}: no token of the Hub; log in with hf auth login, or set HF_TOKEN")


def push(folder: Path, name: str, private: bool = False) -> str:
    """Upload a folder as one commit and return its address; an existing repository keeps its visibility.

    Raises:
        ExportError: the Hub cannot be reached or refuses; the folder stays as it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    api = HfApi()
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Upload a model exported by ctxlm_ds")
    except HfHubHTTPError as error:
        reason = error.server_message or str(error).splitlines()[0]
        raise ExportError(f"{name}: the Hub refuses the upload: {reason}; {folder} is complete") from error
    except (OfflineModeIsEnabled, HTTPError) as error:
        raise ExportError(
            f"{name}: the Hub cannot be reached ({error}); {folder} is complete, and the same command uploads it"
        ) from error
    return str(url)
