"""llmtrain lint: finds mistakes in training manifests, also in those that llmtrain did not write.

Start with check_manifests.py, which runs all rules. In reading order: source.py reads files, yaml_nodes.py keeps line
numbers, kinds.py hides the differences between Kubernetes kinds, manifests.py connects objects, pods and Services,
container_command.py reads commands and variables, training_signs.py recognizes training, rules/ has one function per
mistake, report.py prints.
"""
