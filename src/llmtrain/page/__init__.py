"""The live page of all runs (`llmtrain page`) and the static report (`llmtrain report`).

There is no build step. serve.py starts the server; server.py has its routes, security.py decides who may see them,
actions.py stops and resumes runs, stream.py sends what is new. run_catalog.py joins local_runs.py and cluster_runs.py
(with mirror.py and pod_log_file.py); run_values.py is what is shown of a run, run_groups.py of groups of runs,
sweeps.py of sweeps, values.py encodes it, and series.py and downsample.py are its curves. report.py and
report_markdown.py write files, with own_fields.py. static/ has the scripts of both: app.js (the page), report.js,
curves.js (values, names and colors of the lines) on charts.js (axes and drawing), and page.css (the colors themselves).

A curve: the browser requests /api/curves (server.py, from series.py) once, then adds each row that stream.py sends.
"""
