# `ctxlm completion` fills in the names in at signs.
complete -c ctxlm -f -n __fish_use_subcommand -a "@commands@"
complete -c ctxlm -l config -x -a "@recipes@"
complete -c ctxlm -l deepspeed_config -x -a "@jsons@"
complete -c ctxlm -l deepspeed-config -x -a "@jsons@"
complete -c ctxlm -n 'string match -q -- "-*" (commandline -ct)' -a '(ctxlm (commandline -opc)[2] --help 2>/dev/null | string match -ar -- "--[a-zA-Z][a-zA-Z0-9_-]*" | sort -u)'
