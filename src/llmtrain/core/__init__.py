"""Helpers that several packages use; they import no other package but errors.

Files and text: files, text, redact (secrets). Output: logs, terminal, progress (the live line), svg. Processes: env
(all environment variables that llmtrain defines), programs (running others), interrupts (Ctrl-C, also during imports),
fault_injection. Values: arguments (shared by commands and API), findings (the result of a check), seeds, targets
(positions without loss), install (how to install an extra), gpus (their memory and speed by name). The modules are
independent; open the one you need. A helper moves here once several packages use it, and not before.
"""
