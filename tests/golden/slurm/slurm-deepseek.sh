#!/bin/bash
#SBATCH --chdir=/home/ada/.penstock/runs/deepseek-v3
#SBATCH --output=/home/ada/.penstock/runs/deepseek-v3/logs/%x_%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0
#SBATCH --gpus-per-node=h100:8
#SBATCH --constraint=h200&ib
#SBATCH --time=2-0
#SBATCH --exclusive
#SBATCH --signal=INT@140
#SBATCH --requeue
#SBATCH --reservation=inference
#SBATCH --mail-type=FAIL

# One replica of deepseek-v3: $1 is its number, $2 the id of the launch.
replica=$1 launch=$2 run=/home/ada/.penstock/runs/deepseek-v3

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

# Slurm sends TERM to everything and, KillWait later, KILL. The nodes end by themselves in that time; this shell waits.
trap : TERM
kill_wait=$(scontrol show config | sed -n 's/^KillWait *= *\([0-9][0-9]*\).*/\1/p')
hosts=$(scontrol show hostnames | paste -sd, -)
step=(srun --overlap --mem=0 --ntasks-per-node=1 --cpu-bind=none)
on_node=''  # the lines of slurm.prologue: each node runs them

"${step[@]}" --label --wait=10 bash -c "$on_node"'exec "$@" --rank "$SLURM_PROCID"' node \
  apptainer exec --nv --bind /home/ada/.penstock,/shared/models/x /shared/images/vllm-0.33.sif env -u PYTHONHOME PYTHONNOUSERSITE=1 PYTHONPATH=/home/ada/.penstock/runs/deepseek-v3/code HOME=/home/ada python3 -m penstock.node.detached "$run" "$launch" "$replica" --hosts "$hosts" --kill-after "${kill_wait:-30}"
code=$?

# Whatever a killed node left behind: without cgroups it would outlive the job.
note "sweeping after $code"
"${step[@]}" bash -c "$on_node"'exec "$@"' leftovers \
  /usr/bin/python3 -m penstock.node.leftovers "$run" "$launch" "$replica"
note "ended $code"
exit $code
