#!/bin/bash -l
#SBATCH --chdir=/home/ada/.penstock/runs/llama-405b
#SBATCH --output=/home/ada/.penstock/runs/llama-405b/logs/%x_%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0
#SBATCH --gpus-per-node=h100:4
#SBATCH --partition=gpu
#SBATCH --qos=large
#SBATCH --time=1-0
#SBATCH --account=lab
#SBATCH --exclusive
#SBATCH --signal=INT@140
#SBATCH --requeue

# One replica of llama-405b: $1 is its number, $2 the id of the launch.
replica=$1 launch=$2 run=/home/ada/.penstock/runs/llama-405b

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
module load cuda/12.8 || give_up 'failed: module load cuda/12.8'
module load nccl || give_up 'failed: module load nccl'
source /shared/envs/vllm/bin/activate || give_up 'could not activate the virtual environment /shared/envs/vllm'

# Slurm sends TERM to everything and, KillWait later, KILL. The nodes end by themselves in that time; this shell waits.
trap : TERM
kill_wait=$(scontrol show config | sed -n 's/^KillWait *= *\([0-9][0-9]*\).*/\1/p')
hosts=$(scontrol show hostnames | paste -sd, -)
step=(srun --overlap --mem=0 --ntasks-per-node=1 --cpu-bind=none)
on_node=''  # the lines of slurm.prologue: each node runs them

"${step[@]}" --label --wait=10 bash -c "$on_node"'exec "$@" --rank "$SLURM_PROCID"' node \
  python3 -m penstock.node.detached "$run" "$launch" "$replica" --hosts "$hosts" --kill-after "${kill_wait:-30}"
code=$?

# Whatever a killed node left behind: without cgroups it would outlive the job.
note "sweeping after $code"
"${step[@]}" bash -c "$on_node"'exec "$@"' leftovers \
  python3 -m penstock.node.leftovers "$run" "$launch" "$replica"
note "ended $code"
exit $code
