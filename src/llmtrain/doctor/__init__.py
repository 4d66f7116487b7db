"""llmtrain doctor: preflight checks of a machine, and of all processes of a run together.

Start with examine.py, which decides what is checked. diagnose.py lists the checks of one process in order; they are in
environment.py, machine.py, file_system.py, memory.py and network.py. collective.py needs the other processes.
report.py prints. A check yields `Finding`s (core/findings.py) and never stops the others. The public functions are in
llmtrain/diagnose.py.
"""
