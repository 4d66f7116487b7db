"""What earlier versions need: their config documents, records, run directories, logs and numerics.

upgrade.py: config documents of schema 1 and 2 as schema 3, on load. downgrade.py: the reverse, for images from before
schema 3. numerics.py: how numbers are rounded, in all versions including the current one, because a run keeps the
version that it was started with. The other modules each handle one kind of record of 0.1.0 and say so in their first
line. Tests: tests/compat.
"""
