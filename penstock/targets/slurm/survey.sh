give_up() { echo "$*" >&2; echo 1 >"$at.code"; exit 1; }
at=@folder@/$SLURM_PROCID
echo "${SLURMD_NODENAME:-$(hostname)}" >"$at.host"
@prologue@
"${@//\{rank\}/$SLURM_PROCID}" >"$at.out" 2>"$at.err"
echo $? >"$at.code.new" && mv "$at.code.new" "$at.code"
