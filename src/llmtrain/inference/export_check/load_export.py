"""Loads an export with the libraries it is for, and writes what they compute: tokens, logits, a continuation.

export_check.py runs this file in a process of its own, which does not import llmtrain, and compares:
    python -P load_export.py DIRECTORY       with DIRECTORY/request.json; writes result.json and logits.safetensors
"""

import ctypes
import importlib.util
import json
import signal
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Values = dict[str, Any]
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# transformers does not take these fields from a GGUF file, although they are there: model_type -> field of its config
# -> key of the file. Without them it builds another model.
GGUF_FIELDS = {
    "gpt2": {"n_positions": "context_length", "n_inner": "feed_forward_length"},
    "qwen3": {"head_dim": "attention.key_length"},
}


def main() -> None:
    directory = Path(sys.argv[1])
    if sys.platform == "linux":  # llmtrain may be killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    request = json.loads((directory / "request.json").read_text())
    names = ["transformers", "torch", "peft"] if request["base"] else ["transformers", "torch"]
    result: Values = {"versions": {name: version(name) for name in names}}
    part = "tokenizer"
    try:
        result["tokenizer"] = read_tokenizer(request)
        part = "model"
        result["model"] = run_model(request, directory / "logits.safetensors")
        if request["file"] and importlib.util.find_spec("xllamacpp"):
            part = "model with llama.cpp"
            result["versions"]["xllamacpp"] = version("xllamacpp")
            result["llama_cpp"] = run_llama_cpp(request)
    except Exception as problem:  # the libraries raise many types
        result["error"] = {"part": part, "what": f"{type(problem).__name__}: {problem}"}
    (directory / "result.json").write_text(json.dumps(result))


def read_tokenizer(request: Request) -> Values:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["folder"], **load_options(request))
    rendered = None
    if request["messages"]:
        rendered = tokenizer.apply_chat_template(
            request["messages"], tokenize=False, add_generation_prompt=True, date_string=request["date"]
        )
    return {
        "ids": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in request["texts"]],
        "special_tokens": {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS},
        "conversation": rendered,
    }


def load_options(request: Request) -> Values:
    options: Values = {"local_files_only": True, "trust_remote_code": request["trust_remote_code"]}
    if request["file"]:
        options["gguf_file"] = request["file"]
    return options


def run_model(request: Request, logits_file: Path) -> Values:
    """Writes the last logits of each sequence, and returns what follows the prompt."""
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    model = load_model(request)
    eos = model.generation_config.eos_token_id
    logits = {}
    with torch.no_grad():
        for index, ids in enumerate(request["sequences"]):
            found = model(input_ids=torch.tensor([ids])).logits  # (1, T, V)
            logits[str(index)] = found[0, -request["positions"] :].float().contiguous()
    save_file(logits, logits_file)
    prompt = torch.tensor([request["prompt"]])
    # Without the penalties and the temperature of the model's own settings: plainly the most likely tokens.
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=0, do_sample=False)
    if request["base"]:
        from peft import PeftModel

        assert isinstance(model, PeftModel)
        model.get_base_model().generation_config = model.generation_config
    text = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request["max_new_tokens"]
    )
    continuation = text[0, prompt.shape[1] :].tolist()
    has_ended = continuation[-1:] in [[token] for token in (eos if isinstance(eos, list) else [eos])]
    return {"eos": eos, "continuation": continuation, "has_ended": has_ended}


def load_model(request: Request) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options = {**load_options(request), "dtype": torch.float32}
    if request["file"]:
        options["config"] = gguf_config(request)
    model = AutoModelForCausalLM.from_pretrained(request["base"] or request["folder"], **options)
    if request["base"]:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, request["folder"])
    return model.eval()


def gguf_config(request: Request) -> Any:
    from gguf import GGUFReader
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(request["folder"], **load_options(request))
    fields = GGUFReader(str(Path(request["folder"]) / request["file"])).fields
    for name, key in GGUF_FIELDS.get(config.model_type, {}).items():
        setattr(config, name, int(fields[f"{config.model_type}.{key}"].contents()))
    return config


def run_llama_cpp(request: Request) -> Values:
    """The token ids of the texts, and what follows the prompt, by llama.cpp itself."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(Path(request["folder"]) / request["file"])
    parameters.n_ctx = request["context_length"]
    parameters.n_parallel = 1
    parameters.n_gpu_layers = 0
    parameters.warmup = False
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)  # on a free port of this machine
    greedy = {"temperature": 0, "top_k": 1, "n_predict": request["max_new_tokens"], "return_tokens": True}
    answer = post(f"{server.listening_address}/completion", {"prompt": request["prompt"], **greedy})
    ids = []
    for text in request["texts"]:
        body = {"content": text, "add_special": False, "parse_special": True}
        ids.append(post(f"{server.listening_address}/tokenize", body)["tokens"])
    # The token that ends a text is not among the tokens.
    return {"ids": ids, "continuation": answer["tokens"], "has_ended": answer.get("stop_type") == "eos"}


def post(url: str, body: Values) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine, without a proxy
    with direct.open(request) as response:  # a large model takes minutes
        return json.load(response)


if __name__ == "__main__":
    main()
