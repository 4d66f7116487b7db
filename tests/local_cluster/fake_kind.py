"""Stands in for the programs kind, docker, podman, buildah and kubectl, which the tests cannot have: the commands we
use, with the words, the exit codes and the strictness of the real ones (pkg/cmd and pkg/apis/config/v1alpha4 of kind's
repository).

Containers are a JSON file in $FAKE_KIND. A file `fail` there says what is to go wrong.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import yaml

HOME = Path(os.environ["FAKE_KIND"])
# Fields of kind.x-k8s.io/v1alpha4; kind refuses any other.
CLUSTER = {"kind", "apiVersion", "name", "nodes", "networking", "featureGates", "runtimeConfig"}
CLUSTER |= {"kubeadmConfigPatches", "kubeadmConfigPatchesJSON6902"}
CLUSTER |= {"containerdConfigPatches", "containerdConfigPatchesJSON6902"}
NODE = {"role", "image", "labels", "extraMounts", "extraPortMappings"}
NODE |= {"kubeadmConfigPatches", "kubeadmConfigPatchesJSON6902"}
MOUNT = {"containerPath", "hostPath", "readOnly", "selinuxRelabel", "propagation"}
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"


def main(program: str, words: list[str]) -> None:
    with (HOME / "calls").open("a") as calls:
        calls.write(json.dumps([program, *words]) + "\n")
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    if program == "kind":
        if is_to_fail("daemon"):
            print('ERROR: failed to list clusters: command "docker ps -a" failed', file=sys.stderr)
            end(f"\nCommand Output: {DOWN}")
        {"get": get, "create": create, "delete": delete, "export": export, "load": load}[words[0]](words, options)
    elif program == "kubectl":
        kubectl(words, options)
    elif words[:2] == ["container", "inspect"]:
        if is_to_fail("inspect"):
            end(DOWN)
        found = containers().get(words[2]) or end(f"Error response from daemon: No such container: {words[2]}")
        print(json.dumps([found]))
    elif words[0] == "version":
        print("fake")
    elif words[0] == "build":
        (HOME / "images").write_text(words[words.index("--tag") + 1])
    elif program == "buildah":
        assert words[:2] == ["push", "--"]
        if words[2] not in images():
            end(f"Error: {words[2]}: image not known")
        kind, archive, *name = words[3].split(":")
        assert (kind, ":".join(name)) == ("docker-archive", words[2])
        Path(archive).write_text(words[2])
    elif words[0] == "save":
        if words[-1] not in images():
            end(f"Error: {words[-1]}: image not known")
        Path(words[2]).write_text(words[-1])


def kubectl(words: list[str], options: dict[str, str]) -> None:
    """Applies an address, or waits for a deployment of what was applied."""
    assert yaml.safe_load(kubeconfig(options).read_text())["current-context"] == options["context"]
    if words[0] == "apply":
        assert words[1] == "--server-side"
        assert words[2] in ("-k", "-f")
        if is_to_fail("apply"):
            end("error: evalsymlink failure on 'github.com': no such host")
        print("serverside-applied")
    else:
        assert (words[0], options["for"]) == ("wait", "condition=Available")
        assert words[1].startswith("deployment/")
        if is_to_fail("wait"):
            end(f"error: timed out waiting for the condition on deployments/{words[1].partition('/')[2]}")


def get(words: list[str], options: dict[str, str]) -> None:  # noqa: ARG001
    assert words[1] == "clusters"
    names = sorted({found["Cluster"] for found in containers().values()})
    print("\n".join(names)) if names else print("No kind clusters found.", file=sys.stderr)


def create(words: list[str], options: dict[str, str]) -> None:
    assert words[1] == "cluster"
    assert options["config"] == "-"
    name, config = options["name"], yaml.safe_load(sys.stdin)
    check(config)
    print(f'Creating cluster "{name}" ...', file=sys.stderr)
    if is_to_fail("raced"):
        put(name, [{"role": "control-plane"}])
    if any(found["Cluster"] == name for found in containers().values()):
        end(f'ERROR: failed to create cluster: node(s) already exist for a cluster with the name "{name}"')
    if is_to_fail("create"):  # it removes what it made
        end('ERROR: failed to create cluster: failed to pull image "node"\n\nCommand Output: no route to host')
    put(name, config["nodes"])
    if is_to_fail("hang"):
        time.sleep(60)
    if is_to_fail("half"):
        end("ERROR: failed to create cluster: failed to lock config file")
    write_context(name, options)


def delete(words: list[str], options: dict[str, str]) -> None:
    assert words[1] == "cluster"
    if is_to_fail("delete"):
        end(f'ERROR: failed to delete cluster "{options["name"]}": failed to delete nodes')
    save({key: found for key, found in containers().items() if found["Cluster"] != options["name"]})
    file = kubeconfig(options)
    file.unlink(missing_ok=True)


def export(words: list[str], options: dict[str, str]) -> None:
    assert words[1] == "kubeconfig"
    if is_to_fail("export"):
        end("ERROR: failed to get cluster internal kubeconfig: container is not running")
    write_context(options["name"], options)


def load(words: list[str], options: dict[str, str]) -> None:
    names = words[words.index("--") + 1 :]
    image = names[0] if words[1] == "docker-image" else Path(names[0]).read_text()
    if words[1] == "docker-image" and image not in images():
        end(f'ERROR: image: "{image}" not present locally')
    (HOME / "loaded").write_text(f"{image} {options['name']}")


def check(config: dict[str, Any]) -> None:
    """As kind: it knows these fields only, and there is at least one control plane."""
    assert (config["kind"], config["apiVersion"]) == ("Cluster", "kind.x-k8s.io/v1alpha4")
    assert set(config) <= CLUSTER, config
    for node in config["nodes"]:
        assert set(node) <= NODE, node
        assert node["role"] in ("control-plane", "worker")
        for mount in node.get("extraMounts", []):
            assert set(mount) <= MOUNT, mount
            assert Path(mount["hostPath"]).is_dir(), "docker would make it, for root"
            assert Path(mount["containerPath"]).is_absolute()
    assert [node["role"] for node in config["nodes"]].count("control-plane") == 1


def put(cluster: str, nodes: list[dict[str, Any]]) -> None:
    made = containers()
    numbers: dict[str, int] = {}
    for node in nodes:
        number = numbers[node["role"]] = numbers.get(node["role"], 0) + 1
        own = [{"Type": "volume", "Source": "/var/lib/docker/x", "Destination": "/var"}]
        more = [
            {"Type": "bind", "Source": mount["hostPath"], "Destination": mount["containerPath"]}
            for mount in node.get("extraMounts", [])
        ]
        name = f"{cluster}-{node['role']}{number if number > 1 else ''}"
        made[name] = {"Id": os.urandom(8).hex(), "Name": f"/{name}", "Cluster": cluster, "Mounts": own + more}
    save(made)


def write_context(name: str, options: dict[str, str]) -> None:
    context = f"kind-{name}"
    document = {
        "clusters": [{"name": context, "cluster": {"server": os.environ["FAKE_SERVER"]}}],
        "users": [{"name": context, "user": {}}],
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
        "current-context": context,
    }
    kubeconfig(options).write_text(yaml.safe_dump(document))


def kubeconfig(options: dict[str, str]) -> Path:
    return Path(options.get("kubeconfig") or os.environ["KUBECONFIG"])


def containers() -> dict[str, Any]:
    file = HOME / "containers.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def save(value: dict[str, Any]) -> None:
    # Renamed into place: a test reads the file while the program runs.
    written = HOME / f"containers.json.{os.getpid()}"
    written.write_text(json.dumps(value))
    written.rename(HOME / "containers.json")


def images() -> list[str]:
    return (HOME / "images").read_text().split() if (HOME / "images").exists() else []


def is_to_fail(what: str) -> bool:
    file = HOME / "fail"
    return file.exists() and what in file.read_text().split()


def end(said: str) -> Any:
    print(said, file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[0]).name, sys.argv[1:])
