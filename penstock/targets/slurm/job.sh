
# One replica of @name@: $1 is its number, $2 the id of the launch.
replica=$1 launch=$2 run=@run@

# What became of this job, for when Slurm has forgotten it.
note() {
  printf '%s\n' "$*" >"$run/jobs/.$SLURM_JOB_ID" && mv "$run/jobs/.$SLURM_JOB_ID" "$run/jobs/$SLURM_JOB_ID"
}
give_up() {
  echo "penstock: $*"
  note "failed $*"
  exit 1
}
note "started $SLURM_JOB_NODELIST"
@prologue@
# Slurm sends TERM to everything and, KillWait later, KILL. The nodes end by themselves in that time; this shell waits.
trap : TERM
kill_wait=$(scontrol show config | sed -n 's/^KillWait *= *\([0-9][0-9]*\).*/\1/p')
hosts=$(scontrol show hostnames | paste -sd, -)
step=(srun --overlap --mem=0 --ntasks-per-node=1 --cpu-bind=none)
on_node=@on_node@  # the lines of slurm.prologue: each node runs them

"${step[@]}" @step@--wait=10 bash -c "$on_node"'exec "$@" --rank "$SLURM_PROCID"' node \
  @inside@ -m penstock.node.detached "$run" "$launch" "$replica" --hosts "$hosts" --kill-after "${kill_wait:-30}"
code=$?

# Whatever a killed node left behind: without cgroups it would outlive the job.
note "sweeping after $code"
"${step[@]}" bash -c "$on_node"'exec "$@"' leftovers \
  @python@ -m penstock.node.leftovers "$run" "$launch" "$replica"
note "ended $code"
exit $code
