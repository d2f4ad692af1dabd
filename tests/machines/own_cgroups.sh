for controller in {controllers}; do
  group=/sys/fs/cgroup/$controller/{group}
  mkdir -p $group
  if [ $controller = cpuset ]; then
    cat /sys/fs/cgroup/cpuset/cpuset.cpus >$group/cpuset.cpus
    cat /sys/fs/cgroup/cpuset/cpuset.mems >$group/cpuset.mems
  fi
  mount --bind $group /sys/fs/cgroup/$controller
done
