set -eu
base=$1 name=$2 lifeline=$3; shift 3
own=$base/hosts/$name
hostname "$name"
for place in /tmp /var/tmp /root; do
  for kept; do
    case $kept in $place/*) mkdir -p "$own$kept"; mount --rbind "$kept" "$own$kept";; esac
  done
  mount --rbind "$own$place" "$place"
done
for file in "$base"/etc/system/*; do mount --bind "$file" "/etc/${file##*/}"; done
mount --rbind /sys/fs/cgroup "$own/cgroup"
mount -t sysfs sysfs /sys       # else /sys/class/net lists the interfaces of the machine outside
mount --move "$own/cgroup" /sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777,size=2g tmpfs /dev/shm
mkdir -p /run/sshd /run/lock /run/munge
# Link-local addresses would be a second way between the hosts, which no test means to try.
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 2>/dev/null || :
ip link set lo up
if [ -e "$base/keys/$name" ]; then
  /usr/sbin/sshd -D -f "$base/etc/sshd_config" -h "$base/keys/$name" -E "$base/log/$name.sshd" &
fi
: >"$base/run/$name.ready"
while read -r -u "$lifeline" _; do :; done
