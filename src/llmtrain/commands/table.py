"""The commands, as `llmtrain --help` lists them: what people use daily first.

Each is the function `command` of the module with its name in this package; one with subcommands is `app` of its module.
"""

COMMANDS = {
    "Train and use models": {
        "init": "Write a commented config for your text, examples or preference pairs.",
        "train": "Train a model, or resume a run.",
        "plan": "Estimate whether a run fits, how long it takes and what it costs.",
        "runs": "List, show, compare, price and prune runs.",
        "page": "Show runs in the browser, live.",
        "report": "Write runs to one HTML file, or to Markdown.",
        "generate": "Generate text with a run, an adapter or a model directory.",
        "chat": "Chat with a model in the terminal.",
        "eval": "Evaluate a model on text files and tasks.",
        "sweep": "Search for the best values of config fields.",
        "export": "Write a model that transformers, peft or llama.cpp loads.",
    },
    "On a Kubernetes cluster": {
        "launch": "Run a config or a command on a cluster, and watch it.",
        "status": "Show the runs of a namespace, or one run with its pods.",
        "logs": "Print the logs of all pods of a run, merged by time.",
        "why": "Explain why a run is not healthy: cause, evidence, remedy.",
        "stop": "Save a checkpoint and stop a run.",
        "resume": "Launch a run again from its newest checkpoint.",
        "fetch": "Download a run from the cluster's volume.",
        "delete": "Remove a run from the cluster.",
        "push": "Copy files into the pods of a run launched with --hold.",
        "exec": "Run a command in the pods of a run.",
        "recover": "Replace pods on nodes that are NotReady, and pods with a rank that hangs.",
        "guard": "Keep the runs of a namespace alive unattended.",
        "lint": "Check training manifests for common mistakes.",
        "secret": "Create secrets that manifests refer to.",
        "cluster": "Create a local cluster with Docker and kind (the tool).",
    },
    "Configs": {
        "presets": "List the presets that --config accepts by name, or show one.",
        "validate": "Check a config and list every problem.",
        "print-config": "Print the resolved config.",
        "config-schema": "Print the JSON Schema of config files, for editors.",
    },
    "Models and data": {
        "fetch-model": "Download a model from the Hugging Face hub.",
        "fetch-data": "Download a dataset from the Hugging Face hub.",
        "fetch-tasks": "Download the data of evaluation tasks from the Hugging Face hub.",
        "prefetch": "Download everything a config names on the hub.",
        "tokenizer": "Train a tokenizer.",
        "data": "Look at the data of a config: sources, samples, lengths, duplicates.",
        "sync": "Copy a run directory to S3.",
    },
    "Machines and processes": {
        "doctor": "Check this machine, or all processes of a job, before training.",
        "smoke": "Train a tiny classifier on synthetic data to test processes, network and device.",
        "node": "Start and supervise the processes of one node.",
    },
}
OTHER_NAMES = {
    "compare": "runs compare",
    "evaluate": "eval",
    "finetune": "train",
    "fine-tune": "train",
    "fit": "train",
    "infer": "generate",
    "list": "runs list",
    "ls": "runs list",
    "ps": "status",
    "run": "train",
    "sample": "generate",
    "serve": "page",
    "sft": "train",
    "show": "runs show",
    "submit": "launch",
}
"""What other tools call a command of llmtrain -> that command."""
NOT_AVAILABLE = {
    "dpo": "Run `llmtrain init --preferences pairs.jsonl`, then `llmtrain train`: docs/fine-tuning.md.",
}
"""Commands that people look for and llmtrain does not have -> what to do instead."""
GROUPS = ("secret", "guard", "cluster", "presets", "runs", "sweep", "tokenizer", "data")
MODULES = {"eval": "evaluate"}
