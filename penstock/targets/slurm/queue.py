"""Parses what Slurm prints of jobs: squeue, sbatch, sacct, reasons, times and sizes. Pure."""

from __future__ import annotations

import functools
import re
from datetime import datetime

import msgspec

from penstock.hardware.catalog import read_yaml

# The reason comes last: it may contain anything.
FIELDS = ("%i", "%T", "%S", "%e", "%N", "%j", "%Z", "%r")
SEPARATOR = "\t"
FORMAT = SEPARATOR.join(FIELDS)

# https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES
_PLACED = {"RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "RESIZING", "SUSPENDED", "STOPPED"}
_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_ENDED_BY_TERM = "143"  # the exit code of `penstock.node --kill-after` after SIGTERM

_LIMITS = re.compile(r"(QOS|Assoc)(Max|Grp|Min)?(\w+)\Z")
_WHAT = {"Jobs": "jobs", "Cpu": "CPUs", "CPU": "CPUs", "GRES": "GPUs", "Node": "nodes", "Mem": "memory", "Wall": "time"}

_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(\d+)(?::(\d+))?(?::(\d+))?)\Z")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?\Z", re.IGNORECASE)
_MIB_OF = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024 * 1024}


class Job(msgspec.Struct, frozen=True):
    """A job of squeue; times in Unix seconds."""

    number: str
    state: str
    starts_at: float | None
    ends_at: float | None
    nodes: str
    name: str
    folder: str
    reason: str

    @property
    def is_queued(self) -> bool:
        return self.state in _QUEUED

    @property
    def is_over(self) -> bool:
        return self.state not in _PLACED and self.state not in _QUEUED


def parse_jobs(text: str) -> dict[str, Job]:
    """Jobs by number from `squeue -h -o FORMAT`."""
    jobs = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.split(SEPARATOR, len(FIELDS) - 1)]
        if len(words) == len(FIELDS):
            number, state, starts_at, ends_at, *rest = words
            jobs[number] = Job(number, state, _time(starts_at), _time(ends_at), *rest)
    return jobs


def parse_submitted(text: str) -> tuple[str, str | None] | None:
    """The job's number from `sbatch --parsable`, after any words of the site, and its cluster if named ("17;gpu")."""
    jobs = re.findall(r"^(\d+)(?:;(\S+))?$", text, re.MULTILINE)
    return (jobs[-1][0], jobs[-1][1] or None) if jobs else None


def parse_sacct(text: str) -> dict[str, str]:
    """State by job number from `sacct -X -n -P -o JobIDRaw,State`; "CANCELLED by 1000" keeps its uid."""
    rows = (line.split("|", 1) for line in text.splitlines() if "|" in line)
    return {row[0]: row[1] for row in rows}


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # "N/A", "NONE", "Unknown"
        return None


@functools.cache
def _words() -> dict[str, dict[str, str]]:
    return dict(read_yaml("penstock.targets.slurm", "words.yaml"))


def reason_in_words(reason: str) -> str:
    """Why a job waits, in words and with Slurm's own, which users look up and quote to their admin."""
    plain = reason.strip("()")
    rows = _words()["waits"]
    words = rows.get(plain) or rows.get(plain.split(",")[0].split(":")[0].strip())
    limit = _LIMITS.match(plain)
    if words is None and limit is not None:
        whose = "its QOS" if limit.group(1) == "QOS" else "its account"
        what = next((word for key, word in _WHAT.items() if key in limit.group(3)), "use")
        words = f"{whose} has as much as it may of {what}"
    return f"{words} ({plain})" if words and plain != "None" else words or plain


def end_in_words(state: str, note: str | None) -> str:
    """How a job ended. `note` is the last line of the job's own file: "ended 137", "failed because"."""
    word, _, rest = (note or "").partition(" ")
    if word == "ended" and rest == _ENDED_BY_TERM:
        return "was ended by Slurm: preempted, or out of time"
    why = f": {rest}" if word == "failed" else f" with code {rest}" if word == "ended" and rest != "0" else ""
    return _words()["ended"].get(state, state.lower()) + why


def seconds_of(text: str) -> float | None:
    """Slurm's time: "30" (minutes), "30:00", "4:00:00", "1-12" (days-hours), "1-12:30". None for anything else."""
    match = _TIME.match(text.strip())
    if match is None:
        return None
    days, *rest = (int(word or 0) for word in match.groups())
    hours, minutes, seconds = rest[3:]
    if match.group(1) is not None:
        hours, minutes, seconds = rest[:3]
    elif match.group(7) is None:
        hours, minutes, seconds = 0, hours, minutes
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def mib_of(text: str) -> int | None:
    """Slurm's memory: "64G" is 65536; without a letter it is MiB. None for anything else."""
    match = _MEMORY.match(text)
    return int(int(match.group(1)) * _MIB_OF[match.group(2).upper()]) if match else None
