"""The files of a run on disk, without torch: what training writes, and what every other part reads.

Start with directory.py, which names all files. Writers: lock.py (one writer per run), generations.py (starts and how
they ended), heartbeats.py, metrics.py, metadata.py, exit_report.py (in a pod also the termination message), result.py,
checksums.py (hashes of a checkpoint). Readers: view.py (RunView, the one reader), then explain.py (`llmtrain why`),
listing.py, compare.py, groups.py; recorded_config.py and run_plugins.py for a run that is used again. progress_lines.py
has the log lines that say how far a run is. prune.py deletes, sync.py copies.

The state of a run: state.py has the words, view.py decides for a run of this machine, operate/status/state.py for one
on a cluster; a crash is not a state, but a cause that explain.py gives. Who may write, and how long a start waits for
the owner: lock.py; which starts may take over: training/ownership.py.
"""
