"""The guard: a Deployment that recovers the runs of a namespace and notifies a webhook.

Start with watch.py, the program in its pod: it replaces pods on lost nodes (operate/recover.py, as `llmtrain recover`
does) and reports runs that end. manifests.py renders the objects, install.py creates, changes and removes them, and
status.py reads whether the guard is watching. The guard never restarts a run, it replaces pods: operate/recover.py
decides which, from what operate/status/lost_nodes.py says of their nodes.
"""
