# shellcheck shell=bash disable=SC2207
# `ctxlm completion` fills in the names in at signs.
_ctxlm() {
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
