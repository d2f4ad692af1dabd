"""A strict stand-in for a Cloudera AI workbench: its API v2 for one user, with applications and jobs as real processes.

Written from a table of the API's calls and fields, not from Cloudera's document, and never compared with a workbench.
It refuses what it does not know, and has the habits that clients trip over: pages of two rows, 64-bit numbers as text,
an environment that comes back as text, stops without grace, folders that must be emptied before they are deleted.
"""
