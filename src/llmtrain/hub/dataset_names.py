"""Datasets that are known by a name without an owner, such as `wikitext`. The hub has moved them to their owners, and
the datasets library refuses the short names since its version 5."""

import functools
from pathlib import Path

from llmtrain.files import read_json, write_json
from llmtrain.hub.token import hub_token
from llmtrain.logs import log

# Where the hub sends these names, so that it need not be asked. Only c4 is ours: the hub names a repository that holds
# a script, which the library no longer runs, and its card names this one.
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
ANSWERS = "hub-names.json"
HUB_TIMEOUT_SEC = 30.0


def full_dataset_name(name: str, cache: Path) -> str:
    """owner/name of a dataset; a directory, or a name that has an owner, as it is. What the hub answers is kept in
    `cache`, for those that may not ask it later."""
    if "/" in name or Path(name).is_dir():
        return name
    full = f"{OWNERS[name]}/{name}" if name in OWNERS else _ask(name, cache / ANSWERS)
    _tell(name, full)
    return full


def _ask(name: str, answers: Path) -> str:
    from huggingface_hub import HfApi

    known = read_json(answers)
    known = known if isinstance(known, dict) else {}
    try:
        full = HfApi(token=hub_token()).dataset_info(name, timeout=HUB_TIMEOUT_SEC).id
    except Exception:  # offline, or the hub is away: what it said before is good enough
        if isinstance(known.get(name), str):
            return str(known[name])
        raise
    if known.get(name) != full:
        answers.parent.mkdir(parents=True, exist_ok=True)
        write_json(answers, {**known, name: full})
    return full


@functools.cache
def _tell(name: str, full: str) -> None:
    """Once per process: a dataset is loaded split by split."""
    log("DATA", f"dataset '{name}' is '{full}' on the hub")
