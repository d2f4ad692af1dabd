"""How vLLM shall read a model's files, chosen from what was measured of their disk. Pure.

The first row that fits counts:

| files | choice |
|---|---|
| in memory already | vLLM's default, which maps them |
| on a network, smaller than 90 % of the free memory | read ahead into the page cache (prefetch) |
| on a network, larger | the streamer, where it is installed |
| on a disk, for the CPU | vLLM's default: its copies take longer than the disk |
| on a disk of 1 GB/s, faster past the page cache or too small a cache, one machine | instanttensor, if there |
| on a disk that gives eight readers 1.3 times the rate of one that maps the files, files fit | prefetch |
| else | vLLM's default |
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from penstock.engines import Disk, LoadChoice
from penstock.engines.vllm import names
from penstock.models.read_rate import CACHED_SHARE, is_in_memory
from penstock.text import bare_flag, show_bytes

# vLLM's own bound for reading ahead by itself (`weight_utils.py`).
_MOST_OF_MEMORY = 0.9
# A slower disk is better read once, into the page cache: the next start then finds the files in memory.
_FAST_BYTES_PER_S = 1e9
_GAIN = 1.3
# Past the page cache every start reads the disk again. On a disk of 1.1 GB/s either way instanttensor took 12.8 s cold
# and 14.6 s again for 20.6 GB, prefetch 14.1 s and 3.6 s (docs/measurements/starts.md).
_DIRECT_GAIN = 1.5
_LOCAL = ("ext", "xfs", "btrfs", "zfs", "f2fs", "overlay")


class Setting(msgspec.Struct, frozen=True):
    """Of the engine: the device, machines of a replica, and which optional packages are installed."""

    device: str
    n_nodes: int = 1
    packages: Collection[str] = ()


def choose(disk: Disk, setting: Setting) -> LoadChoice:
    reading, where = disk.reading, disk.reading.file_system or "this disk"
    # On the CPU the weights themselves take as much again.
    fits = disk.n_bytes * (2 if setting.device == "cpu" else 1) <= _MOST_OF_MEMORY * disk.free_bytes
    if is_in_memory(reading.file_system) or (reading.cached_share or 0.0) >= CACHED_SHARE:
        return LoadChoice("vLLM's default, since the files are in memory")
    if reading.is_of_network and fits:
        return _prefetch(f"since {where} is read over a network and the files fit in memory")
    if reading.is_of_network:
        return _from_network(disk, setting, where)
    if setting.device == "cpu":
        return LoadChoice("vLLM's default")
    if _suits_instanttensor(disk, setting, fits):
        why = f"since {where} gives {reading.bytes_per_s / 1e9:.1f} GB/s past the page cache"
        return LoadChoice(f"{names.INSTANTTENSOR}, {why}", {_key("load_format"): names.INSTANTTENSOR}, "direct")
    gain = (reading.buffered_bytes_per_s or 0.0) / (reading.mapped_bytes_per_s or reading.bytes_per_s)
    if gain < _GAIN:
        return LoadChoice(f"vLLM's default, since one reader gets all that {where} gives")
    if fits:
        return _prefetch(f"since eight readers get {gain:.1f} times the rate of one")
    return LoadChoice(f"vLLM's default, since the files do not fit in {show_bytes(disk.free_bytes)} of free memory")


def _prefetch(why: str) -> LoadChoice:
    return LoadChoice(f"{names.PREFETCH}, {why}", {_key("load_strategy"): names.PREFETCH}, "buffered")


def _from_network(disk: Disk, setting: Setting, where: str) -> LoadChoice:
    too_large = f"the files do not fit in {show_bytes(disk.free_bytes)} of free memory"
    # The nodes of a replica decide each for itself, and a load in common needs the same decision.
    if names.STREAMER_PACKAGE in setting.packages and setting.n_nodes == 1:
        why = f"since {where} is read over a network and {too_large}"
        return LoadChoice(f"{names.STREAMER}, {why}", {_key("load_format"): names.STREAMER}, "buffered")
    return LoadChoice(f"vLLM's default, since {too_large}")


def _suits_instanttensor(disk: Disk, setting: Setting, fits: bool) -> bool:
    reading = disk.reading
    gains = reading.bytes_per_s >= _DIRECT_GAIN * (reading.buffered_bytes_per_s or 0.0)
    return (
        (gains or not fits)
        and setting.n_nodes == 1
        and names.INSTANTTENSOR_PACKAGE in setting.packages
        and reading.is_direct
        and reading.file_system.startswith(_LOCAL)
        and reading.bytes_per_s >= _FAST_BYTES_PER_S
    )


def _key(name: str) -> str:
    return bare_flag(names.FLAGS[name])
