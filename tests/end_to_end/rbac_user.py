"""Users of one namespace with the permissions of a Role."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from kube import ROOT, Kube


def rights_of_the_guide() -> list[dict[str, Any]]:
    """The Role that docs/rbac.md tells people to ask for."""
    section = (ROOT / "docs" / "rbac.md").read_text(encoding="utf-8").partition("\n## Role\n")[2]
    role = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    assert role["kind"] == "Role"
    rules: list[dict[str, Any]] = role["rules"]
    return rules


def user(kube: Kube, name: str, rules: list[dict[str, Any]], folder: Path) -> Kube:
    """Somebody with these rights in the namespace, and none elsewhere; with a kubeconfig and a folder of their own."""
    meta = {"name": name, "namespace": kube.namespace}
    group = "rbac.authorization.k8s.io"
    kube.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    kube.apply({"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": rules})
    subject = {"kind": "ServiceAccount", **meta}
    role = {"apiGroup": group, "kind": "Role", "name": name}
    binding = {"kind": "RoleBinding", "metadata": meta, "subjects": [subject], "roleRef": role}
    kube.apply({"apiVersion": f"{group}/v1", **binding})
    document = yaml.safe_load(kube.kubeconfig.read_text())
    document["users"][0]["user"] = {"token": kube.kubectl("create", "token", name).strip()}
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    (folder / ".env").write_text("HF_TOKEN=hf_" + "0123456789abcdef" * 2 + "\n")
    (folder / ".env").chmod(0o600)
    return replace(kube, kubeconfig=path, folder=folder)
