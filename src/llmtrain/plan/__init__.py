"""Memory, time and cost of a run, before it is started.

Start with plan.py: `make_plan(config, target)` returns a Plan. target.py says where the run would train, and
choose_target.py and launch_target.py find out.
Memory: memory.py runs a step of a model without weights (fake_model.py) and follows its tensors (trace.py), with what
CUDA's kernels, such as attention, save (cuda_kernels.py), or compiled blocks (compiled_blocks.py, graph_memory.py).
equal_blocks.py traces a few of many equal blocks, and memory_value.py adds up.
formula.py is the estimate without torch, micro_batch.py the check before training on a CPU.
Time and cost: time.py, from the finished runs of history.py or from FLOPs; cost.py; spending.py, what runs have cost.
prediction.py is what a run records of its plan when it starts. token_store.py: the tokenized data on disk.
find.py looks for settings that fit, and probe.py measures a few real steps.
"""
