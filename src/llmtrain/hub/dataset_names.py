"""Full names of datasets with a short name, such as `wikitext`. The hub has moved them to owners, and version 5 of the
datasets library refuses short names."""

import functools
from pathlib import Path

from llmtrain.core.files import read_json, write_json
from llmtrain.core.logs import log
from llmtrain.hub.token import hub_token

# The hub redirects to these owners. Only c4 differs: there the hub redirects to a repository with a loading script,
# which the library no longer runs, and whose card refers to this one.
OWNERS = {
    "ag_news": "fancyzhx",
    "bookcorpus": "bookcorpus",
    "c4": "allenai",
    "cnn_dailymail": "abisee",
    "dbpedia_14": "fancyzhx",
    "emotion": "dair-ai",
    "glue": "nyu-mll",
    "gsm8k": "openai",
    "hellaswag": "Rowan",
    "imdb": "stanfordnlp",
    "lambada": "cimec",
    "openwebtext": "Skylion007",
    "ptb_text_only": "ptb-text-only",
    "rotten_tomatoes": "cornell-movie-review-data",
    "squad": "rajpurkar",
    "squad_v2": "rajpurkar",
    "sst2": "stanfordnlp",
    "super_glue": "aps",
    "tiny_shakespeare": "karpathy",
    "wikitext": "Salesforce",
    "xsum": "EdinburghNLP",
    "yelp_review_full": "Yelp",
}
CACHE_FILE = "hub-names.json"
HUB_TIMEOUT_SEC = 30.0


def full_dataset_name(name: str, cache: Path) -> str:
    """owner/name of a dataset; a directory or a name with an owner is returned unchanged. The answer of the hub is
    stored in `cache` for offline use."""
    if "/" in name or Path(name).is_dir():
        return name
    if name in OWNERS:
        full = f"{OWNERS[name]}/{name}"
    else:
        full = _resolve(name, cache / CACHE_FILE)
    _log_once(name, full)
    return full


def _resolve(name: str, cache_file: Path) -> str:
    from huggingface_hub import HfApi

    cached = read_json(cache_file)
    if not isinstance(cached, dict):
        cached = {}
    try:
        full = HfApi(token=hub_token()).dataset_info(name, timeout=HUB_TIMEOUT_SEC).id
    except Exception:  # offline, or the hub is unreachable
        if isinstance(cached.get(name), str):
            return str(cached[name])
        raise
    if cached.get(name) != full:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache_file, {**cached, name: full})
    return full


@functools.cache
def _log_once(name: str, full: str) -> None:
    """Once per process, although each split is loaded separately."""
    log("DATA", f"dataset '{name}' is '{full}' on the hub")
