set -e
mount -t tmpfs run /run
mount --bind {folder}/lib /var/lib
mount --bind {folder}/log /var/log
for name in {kernel}; do
  mount --bind {folder}/kernel/$(basename $name) /proc/sys/$name
done
mount -t tmpfs cgroup /sys/fs/cgroup
{mounts}
containerd --config {folder}/containerd.toml &
until ctr --connect-timeout 1s version >/dev/null 2>&1; do sleep 0.1; done
ctr -n k8s.io images import {folder}/image.tar
{kubelet} --config={folder}/kubelet.json --kubeconfig={kubeconfig} --root-dir={folder}/kubelet \
  --container-runtime=remote --container-runtime-endpoint=unix:///run/containerd/containerd.sock \
  --hostname-override={name} --node-ip={address} --cert-dir={folder}/certs &
wait -n
