"""Print the completion of `ctxlm` for a shell.

    bash:  source <(ctxlm completion bash)                    (in ~/.bashrc)
    zsh:   source <(ctxlm completion zsh)                     (in ~/.zshrc)
    fish:  ctxlm completion fish > ~/.config/fish/completions/ctxlm.fish

It completes subcommands, their options, the names of recipes after --config and of DeepSpeed's JSON files.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from ctxlm_ds.cli import COMMANDS
from ctxlm_ds.installed import shipped_folder

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
BASH = r"""_ctxlm() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="@commands@ --help --version"
    elif [ "$previous" = --config ] || [ "$command" = recipes ]; then
        words="@recipes@"
        [ "$command" = recipes ] && words="show diff $words"
    elif [ "$previous" = --deepspeed_config ] || [ "$previous" = --deepspeed-config ]; then
        words="@jsons@"
    elif [ "${current#-}" != "$current" ]; then
        words=$(ctxlm "$command" --help 2>/dev/null | grep -oE -e '--[a-zA-Z][a-zA-Z0-9_-]*' | sort -u)
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _ctxlm ctxlm
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
FISH_OPTIONS = (
    "complete -c ctxlm -n 'string match -q -- \"-*\" (commandline -ct)' "
    "-a '(ctxlm (commandline -opc)[2] --help 2>/dev/null | string match -ar -- \"--[a-zA-Z][a-zA-Z0-9_-]*\" | sort -u)'"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=sorted(SCRIPTS))
    print(SCRIPTS[parser.parse_args().shell](), end="")


def bash() -> str:
    """Return the script for bash."""
    jsons = _stems(shipped_folder("ds_configs"))
    names = {"commands": list(COMMANDS), "recipes": _stems(RECIPES), "jsons": jsons}
    script = BASH
    for place, words in names.items():
        script = script.replace(f"@{place}@", " ".join(words))
    return script


def zsh() -> str:
    """Return the script for zsh, which reads that for bash."""
    return ZSH + bash()


def fish() -> str:
    """Return the script for fish."""
    lines = [
        f"complete -c ctxlm -f -n __fish_use_subcommand -a {command.name} -d {shlex.quote(command.help)}"
        for command in COMMANDS.values()
    ]
    lines.append(f"complete -c ctxlm -l config -x -a {shlex.quote(' '.join(_stems(RECIPES)))}")
    lines += [
        f"complete -c ctxlm -l {option} -x -a {shlex.quote(' '.join(_stems(shipped_folder('ds_configs'))))}"
        for option in ("deepspeed_config", "deepspeed-config")
    ]
    return "\n".join([*lines, FISH_OPTIONS]) + "\n"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.iterdir() if path.suffix in (".yaml", ".json"))
