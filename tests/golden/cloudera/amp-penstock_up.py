"""Starts the deployment of deployment.yaml in this project; its key is printed once."""

import importlib.util
import subprocess
import sys

if importlib.util.find_spec("penstock") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "penstock"], check=True)
done = subprocess.run([sys.executable, "-m", "penstock", "up", "deployment.yaml", "--no-wait"], check=False)
if done.returncode:
    raise RuntimeError("penstock up failed: its words are above")
