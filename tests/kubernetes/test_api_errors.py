"""What API servers really say when they refuse, and what becomes of it."""

import json

import pytest

from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import AlreadyThere, Missing, NotAllowed, Request, explain_refusal, one_line, quota

JOB = Request("create", "batch/v1", "Job", "team", "demo")
LIST = Request("list", "v1", "Pod", None)
SET = Request("create", "jobset.x-k8s.io/v1alpha2", "JobSet", "team", "demo")
QUOTA = (
    'pods "demo-0" is forbidden: exceeded quota: small, requested: limits.memory=4Gi, used: limits.memory=7Gi, '
    "limited: limits.memory=8Gi"
)
SECURITY = (
    'pods "demo-0" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false '
    '(container "trainer" must set securityContext.allowPrivilegeEscalation=false)'
)
TERMINATING = (
    'jobs.batch "demo" is forbidden: unable to create new content in namespace team because it is being terminated'
)
RIGHTS = (
    'jobs.batch is forbidden: User "system:serviceaccount:team:dev" cannot create resource "jobs" in API group "batch" '
    'in the namespace "team"'
)
STRICT = 'Job in version "v1" cannot be handled as a Job: strict decoding error: unknown field "spec.paralelism"'
WEBHOOK = (
    'Internal error occurred: failed calling webhook "vjobset.kb.io": failed to call webhook: Post '
    '"https://jobset-webhook-service.jobset-system.svc:443/validate?timeout=10s": dial tcp 10.96.1.2:443: connect: '
    "connection refused"
)


def status(code: int, reason: str, message: str) -> str:
    return json.dumps(
        {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }
    )


def explain(request: Request, code: int, body: str) -> LlmtrainError:
    error = explain_refusal(request, code, body)
    assert error is not None
    assert error.details["status"] == f"HTTP {code}"
    return error


# name: request, status, body, class, words of the message, words of the remedy
REFUSALS = {
    "no namespace": (
        JOB,
        404,
        status(404, "NotFound", 'namespaces "team" not found'),
        UsageError,
        "There is no namespace team.",
        "kubectl create namespace team",
    ),
    "no right": (
        JOB,
        403,
        status(403, "Forbidden", RIGHTS),
        NotAllowed,
        "You have no right to create jobs in namespace team.",
        "kubectl auth can-i create jobs -n team",
    ),
    "no right anywhere": (
        LIST,
        403,
        status(
            403,
            "Forbidden",
            'pods is forbidden: User "dev" cannot list resource "pods" in API group "" at the cluster scope',
        ),
        NotAllowed,
        "You have no right to list pods across the whole cluster.",
        "can-i list pods --all-namespaces",
    ),
    "no right to a part": (
        Request("get", "v1", "Pod", "team", "demo-0", "log"),
        403,
        status(
            403,
            "Forbidden",
            'pods "demo-0" is forbidden: User "dev" cannot get resource "pods/log" in API group '
            '"" in the namespace "team"',
        ),
        NotAllowed,
        "You have no right to get pods/log in namespace team.",
        "can-i get pods/log -n team",
    ),
    "machine that does not answer": (
        Request("get", "v1", "Pod", "team", "demo-0", "log"),
        500,
        status(500, "InternalError", "no preferred addresses found; known addresses: [{Hostname }]"),
        ClusterError,
        "cannot get at the log of Pod demo-0 in namespace team (HTTP 500): no preferred addresses found",
        "llmtrain why",
    ),
    "command in a pod that the cluster forbids": (
        Request("create", "v1", "Pod", "team", "demo-0", "exec"),
        403,
        status(403, "Forbidden", 'admission webhook "policy.example.com" denied the request: no shells here'),
        UsageError,
        "forbids a command in Pod demo-0 in namespace team: admission webhook",
        "rule behind it",
    ),
    "quota": (
        JOB,
        403,
        status(403, "Forbidden", QUOTA),
        UsageError,
        "Job demo in namespace team would exceed a quota: small, requested: limits.memory=4Gi, used: "
        "limits.memory=7Gi, limited: limits.memory=8Gi",
        "launch.resources",
    ),
    "namespace is going": (
        JOB,
        403,
        status(403, "Forbidden", TERMINATING),
        UsageError,
        "Namespace team is being deleted.",
        "--namespace",
    ),
    "object is going": (
        JOB,
        409,
        status(409, "AlreadyExists", 'object is being deleted: jobs.batch "demo" already exists'),
        AlreadyThere,
        "Job demo in namespace team is still being deleted.",
        "Wait",
    ),
    "webhook is down": (
        SET,
        500,
        status(500, "InternalError", WEBHOOK),
        ClusterError,
        "connection refused",
        "Is the operator running?",
    ),
    "login": (
        JOB,
        401,
        status(401, "Unauthorized", "Unauthorized"),
        ClusterError,
        "does not accept your login (Unauthorized)",
        "Log in again",
    ),
    "kind as text": (SET, 404, "404 page not found\n", Missing, "This cluster knows no JobSet", "jobset.sigs.k8s.io"),
    "kind as JSON": (
        SET,
        404,
        status(404, "NotFound", "the server could not find the requested resource"),
        Missing,
        "knows no JobSet (jobset.x-k8s.io/v1alpha2)",
        "--kind indexed_job",
    ),
    "kind of Kubernetes itself": (
        Request("create", "policy/v1", "PodDisruptionBudget", "team", "demo"),
        404,
        "404 page not found\n",
        Missing,
        "knows no PodDisruptionBudget (policy/v1)",
        "too old",
    ),
    "busy": (
        JOB,
        429,
        status(429, "TooManyRequests", "the server has received too many requests and has asked us to try again later"),
        ClusterError,
        "too many requests",
        "Try again",
    ),
    "gateway": (LIST, 502, "<html>\r\n<h1>502 Bad Gateway</h1>\r\n</html>", ClusterError, "502 Bad Gateway", "again"),
}
# The same, of which the remedy is missing.
WITHOUT_REMEDY = {
    "security": (
        JOB,
        403,
        status(403, "Forbidden", SECURITY),
        UsageError,
        'security rules refuse Job demo in namespace team: pods "demo-0" is forbidden: violates PodSecurity',
    ),
    "unknown field": (
        JOB,
        400,
        status(400, "BadRequest", STRICT),
        UsageError,
        'refuses Job demo in namespace team: Job in version "v1" cannot be handled as a Job: strict decoding error: '
        'unknown field "spec.paralelism"',
    ),
    "invalid": (
        JOB,
        422,
        status(422, "Invalid", 'Job.batch "demo" is invalid: spec.completions: Invalid value: 0: must be positive'),
        UsageError,
        "spec.completions: Invalid value",
    ),
    "admission": (
        JOB,
        403,
        status(403, "Forbidden", 'admission webhook "policy.example.com" denied the request: images must be signed'),
        UsageError,
        "images must be signed",
    ),
    "exists": (JOB, 409, status(409, "AlreadyExists", 'jobs.batch "demo" already exists'), AlreadyThere, "exists"),
    "conflict": (
        Request("patch", "v1", "ConfigMap", "team", "demo-config"),
        409,
        status(409, "Conflict", "the object has been modified; please apply your changes to the latest version"),
        ClusterError,
        "has been modified",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_one_sentence_and_a_remedy(name: str) -> None:
    request, code, body, error, words, remedy = REFUSALS[name]
    told = explain(request, code, body)
    assert type(told) is error
    assert words in told.what
    assert remedy in str(told.remedy)
    assert "\n" not in told.what
    assert '"kind": "Status"' not in str(told)
    assert told.exit_code == (69 if error is ClusterError else 64)


@pytest.mark.parametrize("name", WITHOUT_REMEDY)
def test_one_sentence(name: str) -> None:
    request, code, body, error, words = WITHOUT_REMEDY[name]
    told = explain(request, code, body)
    assert type(told) is error
    assert words in told.what
    assert "\n" not in told.what


@pytest.mark.parametrize("name", WITHOUT_REMEDY)
def test_and_a_remedy(name: str) -> None:
    request, code, body, _, _ = WITHOUT_REMEDY[name]
    assert explain(request, code, body).remedy


@pytest.mark.parametrize(
    "request_",
    [Request("get", "v1", "Pod", "team", "x"), Request("delete", "batch/v1", "Job", "team", "x")],
    ids=["get", "delete"],
)
def test_what_is_not_there_is_no_error(request_: Request) -> None:
    assert explain_refusal(request_, 404, status(404, "NotFound", 'pods "x" not found')) is None


@pytest.mark.parametrize(
    "body", ["", "{}", "[]", "null", '"x"', '{"message": null}', "\x00\xff", "{", '{"message": 3}']
)
@pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 422, 429, 500, 503])
def test_whatever_the_body_is(code: int, body: str) -> None:
    error = explain_refusal(JOB, code, body)
    if error is not None:
        assert error.what
    assert error is not None or code == 404


def test_long_bodies_are_cut_and_put_on_a_line() -> None:
    told = explain(JOB, 500, status(500, "x", "line\n" * 10_000))
    assert len(str(told)) < 700
    assert "line line" in told.what


def test_the_quota_without_the_sentence_around_it() -> None:
    assert quota(QUOTA).startswith("small, requested: limits.memory=4Gi")
    assert quota("no such words") == "no such words"


def test_secrets_of_the_environment_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canaryCanaryCanary1")
    for code in (400, 401, 403, 409, 422, 500):
        body = status(code, "x", "denied: env HF_TOKEN=hf_canaryCanaryCanary1 at https://me:word@registry.example.com")
        told = explain(JOB, code, body)
        assert "canary" not in json.dumps(told.as_dict())
        assert ":word@" not in str(told)
    assert "canary" not in one_line("token hf_canaryCanaryCanary1")


@pytest.mark.parametrize(
    "secret",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
        "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzeXN0ZW06c2VydmljZSJ9.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg",
    ],
    ids=["hub", "bearer"],
)
def test_what_looks_like_a_token_is_not_repeated(secret: str) -> None:
    """A policy that denies a request may quote it, and a proxy its headers."""
    body = status(403, "Forbidden", f"denied by policy: authorization: Bearer {secret} is not allowed")
    assert secret not in str(explain(JOB, 403, body))
    assert secret not in str(explain(JOB, 401, f"bad header: Authorization: Bearer {secret}"))
