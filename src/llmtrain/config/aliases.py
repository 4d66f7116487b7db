"""Names that other trainers use for config fields. They are never accepted: the error names the field to write."""

# Name in nanoGPT, transformers' Trainer, peft, TRL, axolotl or torchtitan -> field here.
_SAME_MEANING = {
    "adapter": "model.lora",
    "attn_implementation": "model.attention",
    "base_model": "model.path",
    "checkpoint_dir": "output.root_dir",
    "dataset": "data.dataset_name",
    "dataset_path": "data.dataset_name",
    "dataset_text_field": "data.text_column",
    "dataloader_num_workers": "data.num_workers",
    "dim": "model.d_model",
    "eval_interval": "trainer.eval_every_steps",
    "eval_iters": "trainer.eval_batches",
    "eval_steps": "trainer.eval_every_steps",
    "grad_clip": "trainer.max_grad_norm",
    "gradient_clipping": "trainer.max_grad_norm",
    "hidden_size": "model.d_model",
    "init_from": "model.init",
    "intermediate_size": "model.d_ff",
    "learning_rate": "trainer.lr",
    "log_freq": "trainer.log_every_steps",
    "log_interval": "trainer.log_every_steps",
    "logging_dir": "output.root_dir",
    "logging_steps": "trainer.log_every_steps",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.target_modules",
    "lr_decay_iters": "trainer.schedule_steps",
    "lr_scheduler": "trainer.schedule",
    "lr_scheduler_type": "trainer.schedule",
    "max_iters": "trainer.max_steps",
    "max_length": "model.block_size",
    "max_norm": "trainer.max_grad_norm",
    "max_seq_len": "model.block_size",
    "max_seq_length": "model.block_size",
    "model_name_or_path": "model.path",
    "n_embd": "model.d_model",
    "n_head": "model.n_heads",
    "n_kv_head": "model.n_kv_heads",
    "n_layer": "model.n_layers",
    "n_positions": "model.block_size",
    "num_attention_heads": "model.n_heads",
    "num_epochs": "trainer.max_epochs",
    "num_key_value_heads": "model.n_kv_heads",
    "num_hidden_layers": "model.n_layers",
    "num_train_epochs": "trainer.max_epochs",
    "optim": "trainer.optimizer",
    "out_dir": "output.root_dir",
    "output_dir": "output.root_dir",
    "peft_use_dora": "model.lora.dora",
    "peft_use_rslora": "model.lora.rslora",
    "pretrained_model_name_or_path": "model.path",
    "r": "model.lora.rank",
    "run_name": "run.name",
    "sample_packing": "data.packing",
    "save_interval": "trainer.save_every_steps",
    "save_steps": "trainer.save_every_steps",
    "seq_len": "model.block_size",
    "seq_length": "model.block_size",
    "sequence_len": "model.block_size",
    "sequence_length": "model.block_size",
    "steps": "trainer.max_steps",
    "tie_word_embeddings": "model.tie_embeddings",
    "tokenizer_name": "model.tokenizer_path",
    "torch_compile": "trainer.compile",
    "torch_dtype": "model.dtype",
    "train_on_inputs": "data.train_on_prompt",
    "use_dora": "model.lora.dora",
    "use_rslora": "model.lora.rslora",
    "warmup_iters": "trainer.warmup_steps",
}

_MICRO_BATCH = "It counts the sequences per forward pass of one process"
_BETAS = "It is a list of both, such as [0.9, 0.95]"
# Name -> (field here, how to convert the value).
_OTHER_UNIT = {
    "adam_beta1": ("trainer.betas", _BETAS),
    "adam_beta2": ("trainer.betas", _BETAS),
    "batch_size": ("trainer.micro_batch_size", _MICRO_BATCH),
    "beta1": ("trainer.betas", _BETAS),
    "beta2": ("trainer.betas", _BETAS),
    "bf16": ("trainer.precision", "Write bf16 for true, fp32 for false"),
    "decay_lr": ("trainer.schedule", "Write cosine for true, constant for false"),
    "datasets": ("data.dataset_name", "It is one dataset; for a local file set data.train_file or data.files"),
    "do_eval": ("trainer.eval_every_steps", "It is a number of steps; null evaluates only at the end"),
    "dtype": ("trainer.precision", "Write bf16 or fp32"),
    "eval_strategy": ("trainer.eval_every_steps", "It is a number of steps; null evaluates only at the end"),
    "evaluation_strategy": ("trainer.eval_every_steps", "It is a number of steps; null evaluates only at the end"),
    "flash_attention": ("model.attention", "Write flash_attention_2 for true, sdpa for false"),
    "fp16": ("trainer.precision", "Write bf16 or fp32; fp16 is not supported"),
    "global_batch_size": (
        "trainer.grad_accum_steps",
        "It counts micro-batches: divide by trainer.micro_batch_size",
    ),
    "gradient_accumulation_steps": (
        "trainer.grad_accum_steps",
        "It counts the micro-batches of all processes: multiply by the number of processes if yours counts per process",
    ),
    "gradient_checkpointing": ("trainer.activation_checkpointing", "Write blocks for true, none for false"),
    "load_in_4bit": ("model.lora.quantize", "Write true for QLoRA"),
    "load_in_8bit": ("model.lora.quantize", "It loads the base model in 4 bits; 8 bits are not supported"),
    "local_batch_size": ("trainer.micro_batch_size", _MICRO_BATCH),
    "max_tokens": ("trainer.max_steps", "It counts steps: divide by the tokens per step (train --dry-run prints them)"),
    "min_lr_ratio": ("trainer.min_lr", "It is a learning rate: multiply by trainer.lr"),
    "per_device_eval_batch_size": ("trainer.micro_batch_size", "Evaluation uses the same size as training"),
    "per_device_train_batch_size": ("trainer.micro_batch_size", _MICRO_BATCH),
    "report_to": ("tracking", "Each tracker is enabled by a field of its own, such as tracking.mlflow.enabled"),
    "save_strategy": ("trainer.save_every_steps", "It is a number of steps; null saves only at the end"),
    "save_total_limit": ("trainer.keep_checkpoints", "It is at least 2, or all"),
    "val_set_size": ("data.val_fraction", "It is a share above 0 and below 1; for a file set data.val_file"),
    "warmup_ratio": ("trainer.warmup_steps", "It counts steps: multiply by the number of steps of the run"),
}

# Section of another trainer -> section here.
_SECTIONS = {
    "checkpoint": "trainer",
    "fsdp": "distributed",
    "lora": "model.lora",
    "lora_config": "model.lora",
    "metrics": "tracking",
    "optimizer": "trainer",
    "parallelism": "distributed",
    "peft": "model.lora",
    "peft_config": "model.lora",
    "train": "trainer",
    "training": "trainer",
    "training_args": "trainer",
    "training_arguments": "trainer",
}


def alias_of(name: str, is_section: bool) -> tuple[str, str] | None:
    """The field (or section) that another trainer calls `name`, and how to convert its value (empty: unchanged)."""
    if is_section and name in _SECTIONS:
        return _SECTIONS[name], ""
    if name in _OTHER_UNIT:
        return _OTHER_UNIT[name]
    if name in _SAME_MEANING:
        return _SAME_MEANING[name], ""
    return None


def all_targets() -> set[str]:
    """Every field that an alias names."""
    targets = {*_SAME_MEANING.values(), *(field for field, _ in _OTHER_UNIT.values()), *_SECTIONS.values()}
    return {target for target in targets if "." in target}
