#!/bin/bash
# Stands in for apptainer, for podman-hpc and, as srun, for Pyxis, by the name that it is called by. What it starts sees
# the system, the image (the Python in ~/image) and what is mounted, at the same paths: no penstock of this machine.
# ~/containers.log has its own words.
set -e
echo "${0##*/} $*" >>~/containers.log

enter() {  # the mounts, then the command
  export mounts=$1
  shift
  exec unshare --mount --propagation slave bash -c '
    root=$(mktemp -d)
    mount -t tmpfs image "$root"
    for path in /usr /bin /lib /lib64 /etc /proc /sys /dev ~/image $mounts; do
      mkdir -p "$root$path"
      mount --rbind "$path" "$root$path"
    done
    exec chroot "$root" env -u mounts "PATH=$HOME/image/bin:/usr/bin:/bin" "$@"' enter "$@"
}

case ${0##*/} in
apptainer)
  while [[ $1 != --bind ]]; do shift; done
  binds=$2
  shift 3
  enter "$HOME /tmp ${binds//,/ }" "$@"
  ;;
podman-hpc)
  shift
  while [[ $1 == -* ]]; do
    [[ $1 == --volume=* ]] && volumes+=" ${1##*:}"
    [[ $1 == --env=* ]] && names+="|${1#--env=}"
    shift
  done
  shift
  for name in $(compgen -e | grep -Ex "${names//\*/.*}"); do kept+=("$name=${!name}"); done
  enter "$volumes" env -i "PATH=$HOME/image/bin:/usr/bin:/bin" "${kept[@]}" env "$@"
  ;;
srun)
  while [[ $1 == -* ]]; do
    case $1 in
    --container-mounts=*) for mount in ${1//[=,]/ }; do [[ $mount == /* ]] && mounts+=" ${mount%%:*}"; done ;;
    --container-* | --no-container-*) ;;
    *) words+=("$1") ;;
    esac
    shift
  done
  exec /usr/bin/srun "${words[@]}" ${mounts:+~/bin/pyxis "$mounts"} "$@"
  ;;
pyxis) enter "$@" ;;
esac
