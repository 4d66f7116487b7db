"""One typed config: a YAML document, checked as a whole, as a frozen `Config`.

Start with schema.py (`Config` and its sections); each section has a file of its own: run, model (with LoRA; what its
fields do is in models/hf/lora.py), data, trainer, distributed, tracking, logging, output, launch, plan. Then load.py,
top to bottom: document.py reads YAML with line numbers, extends.py merges bases, kind_change.py and optimizer_change.py
adapt defaults to overrides, problems.py words every error. sizes.py has the defaults that depend on the size of a
model. reference.py writes docs/config.md, starter.py the config of `llmtrain init`. Documents of earlier schemas:
compat/upgrade.py.

A field that a resumed run may change is typed `MayChange[...]` in the file of its section (section.py has the marker,
`schema.may_change` answers); training/resume.py refuses changes of the others.
"""
