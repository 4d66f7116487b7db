"""Downloading a run from its volume, while it runs or after its pods are gone.

Start with fetch_run.py (what is fetched in which order). reader.py and reader_pod.py read files through a short-lived
pod, transfer.py writes them here, checkpoint.py verifies them. choice.py names the files; find_record.py and
local_run.py say which run it is, and whether the local directory may be written to.
"""
