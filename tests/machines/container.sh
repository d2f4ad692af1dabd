set -e
root={root}
mkdir -p $root
mount -t tmpfs -o mode=755 tmpfs $root
mkdir $root/upper $root/work $root/merged
mount -t overlay -o lowerdir=/,upperdir=$root/upper,workdir=$root/work overlay $root/merged
cd $root/merged
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /dev dev
mount -t tmpfs -o mode=1777,size=64m shm dev/shm
mkdir -p .{image} .{packages} .{home}
{kept}
rm -f etc/resolv.conf
cp {folder}/etc/* etc/
mount --bind {base}/image .{image}
mount --bind {site} .{packages}
{mounts}
{read_only}
pivot_root . .
umount -l .
cd /
exec env -i {env} {command}
