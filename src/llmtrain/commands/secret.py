"""llmtrain secret: create Secrets for pods from local files."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import connect_to_namespace
from llmtrain.commands.options import CURRENT, JsonOption, print_warning, show, with_option_groups
from llmtrain.core.arguments import ClusterPlace

app = typer.Typer(help="Create Secrets in the cluster; manifests only refer to them.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Create Secrets in the cluster; manifests only refer to them."""


@app.command("hf-token")
@with_option_groups
def hf_token_command(
    from_env_file: Annotated[
        str, typer.Option("--from-env-file", help="File with a line HF_TOKEN=...; the token is never printed.")
    ],
    name: Annotated[str, typer.Option(help="Name of the Secret.")] = "hf-token",
    key: Annotated[str, typer.Option(help="Key of the token inside it.")] = "token",
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Create or update the Secret with the Hugging Face token. The token is read from a file, so that it appears in no
    command line, shell history or log."""
    from llmtrain.operate.token_secret import check_names, file_warnings, put_token, read_token

    check_names(name, key)
    file = Path(from_env_file).expanduser()
    token = read_token(file)
    for warning in file_warnings(file):
        print_warning(warning)
    cluster, namespace = connect_to_namespace(place)
    done = put_token(cluster, namespace, name, key, token)
    fields = [f"launch.hf_token_secret.name: {name}"]
    if key != "token":
        fields.append(f"launch.hf_token_secret.key: {key}")
    lines = [f"Secret {name} in namespace {namespace} is {done}. In the config:", *fields]
    show(json_, {"secret": name, "key": key, "namespace": namespace, "done": done}, "\n".join(lines))
