"""Processes and nodes: who takes part in a run, how they find each other, and how they end.

In reading order:
Ranks, without torch: process_info.py and node_info.py decide rank and world size of a process and of a node, from the
variables of platforms that platform_env.py names and parses, and from GPUs, cores and memory (machine_limits.py).
batch_split.py: how many micro-batches a step has, and which of them a rank computes.
One node: node.py supervises it (`llmtrain node`); workers.py starts its processes with torch's elastic agent, which is
agent.py, and worker_exit.py merges their exits; single_process.py needs no agent; platform_codes.py translates exit
codes. nested_launcher.py refuses a launcher in the user's command, found by launchers.py, shell_command.py and
shell_script.py.
All ranks: rendezvous.py waits for the master, network.py selects the interface, world.py joins. Then control_group.py
(flags and errors between ranks), parallel.py (none, ddp, fsdp) and deterministic_reduce.py (sums in a fixed order).

A lost peer is noticed by rendezvous.py and world.py while joining, by control_group.py in a collective, by workers.py
if a process crashed, and by training/watchdog.py if a rank hangs.
"""
